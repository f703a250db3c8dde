"""What the FFNs of a bundle have inside on a text: figure 6 b and c of the STEM paper.

A window of the text runs through the graphs that decode, as the device runs them, on onnxruntime.
Two vectors of each layer are kept at the chosen positions: what the up projection makes, or in its
place the row; and what goes into the down projection, SiLU(gate) * up.

One position is chosen for each distinct token, because all positions of a token have the same row:
their cosines would all be 1 in STEM layers, and say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from stem_edge.bundle import TABLES, Bundle
from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError, InputError
from stem_edge.graph import names as io
from stem_edge.graph.decode import decoding
from stem_edge.graph.encoder import encode
from stem_edge.measuring.geometry_rows import Spread, random_p95, spread
from stem_edge.measuring.workload import read_ids
from stem_edge.progress import Progress
from stem_edge.quantize import F32, I64
from stem_edge.rope import rope_tables
from stem_edge.runtime.engines import check_installed
from stem_edge.runtime.graphs import GraphSource, format_of
from stem_edge.runtime.machine import return_freed_memory, usable_cpus
from stem_edge.runtime.ort_session import open_session
from stem_edge.runtime.providers import CPU
from stem_edge.tables import Tables, open_tables

POSITIONS = 4096  # of the text's beginning, at most
WINDOW = 256  # tokens of a context: what a position sees of the text before it
KEPT_NBYTES = 512 << 20  # of vectors, all layers together
Feeds = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class FfnGeometry:
    """The FFN of one layer at the chosen positions."""

    layer: int
    kind: str  # a key of FFN_TERMS: "dense", or what a STEM layer computes
    up: Spread | None  # of dense layers W_up x, of STEM layers the rows that are looked up
    gated: Spread | None  # of the input of the down projection, SiLU(gate) * up


@dataclass(frozen=True)
class TextGeometry:
    """A text's part in the geometry."""

    file: str
    positions: int  # of the text that were run
    window: int  # tokens of a context, at most
    chosen: int  # positions whose vectors were compared, each of another token
    random_p95_abs: float  # P95 |cos| of random directions as wide as these vectors
    layers: tuple[FfnGeometry, ...]


@dataclass(frozen=True)
class TextTask:
    """A text that is ready to be run, and where to look."""

    bundle: Bundle
    file: Path
    token_ids: I64
    chosen: I64  # ascending positions

    def run(self, stem_layers: list[int], threads: int | None, show: bool | None) -> TextGeometry:
        """Run it, and compare in all dense layers and in these. Raises BackendError."""
        model = self.bundle.manifest.model
        dense = [n for n in range(model.n_layers) if n not in model.stem_layers]
        layers = sorted([*dense, *stem_layers])
        vectors = _vectors(self, layers, threads, show)
        return TextGeometry(
            file=str(self.file),
            positions=len(self.token_ids),
            window=window(model),
            chosen=len(self.chosen),
            random_p95_abs=random_p95(model.d_ff),
            layers=tuple(
                FfnGeometry(
                    layer,
                    model.ffn_kind(layer),
                    spread(vectors.pop(up_name(self.bundle, layer))),
                    spread(vectors.pop(gated_name(layer))),
                )
                for layer in layers
            ),
        )


def prepare(bundle: Bundle, file: Path, sample: int, seed: int) -> TextTask:
    """Read the beginning of a text and choose positions in it.

    Raises InputError for a bundle without a backbone for onnxruntime and a text too short.
    """
    model = bundle.manifest.model
    if bundle.manifest.backbone is None:
        raise InputError(
            f"{bundle.path}: activations of a text are read out of the backbone for onnxruntime, "
            "and this bundle has one for ggml only; add it with: stem-edge export CHECKPOINT "
            f"{bundle.path} --engine onnx --add"
        )
    ids = np.array(read_ids(file, bundle, POSITIONS), np.int64)
    kept = KEPT_NBYTES // (8 * model.d_ff * model.n_layers)  # two vectors of a layer
    chosen = choose(ids, max(2, min(sample, kept)), seed)
    if len(chosen) < 2:
        raise InputError(
            f"{file}: has {len(chosen)} distinct tokens of {bundle.path}, expected at least 2 to "
            "compare them, better some hundred; give a longer text"
        )
    return TextTask(bundle, file, ids, chosen)


def choose(token_ids: I64, count: int, seed: int) -> I64:
    """Ascending positions of up to `count` distinct tokens, each at one of its places, drawn."""
    random = np.random.default_rng(seed)
    order = random.permutation(len(token_ids))
    _, first = np.unique(token_ids[order], return_index=True)
    return np.sort(random.permutation(order[first])[:count])


def window(model: ModelConfig) -> int:
    """Tokens of a context."""
    return min(WINDOW, model.max_context)


def up_name(bundle: Bundle, layer: int) -> str:
    """What the graph calls the up projection's output; of a STEM layer the row it looks up."""
    model, tables = bundle.manifest.model, bundle.manifest.tables
    at = f"layers.{layer}."
    if layer not in model.stem_layers:
        return at + ("up.biased" if "up" in model.biases else "up")
    if model.row_rank:
        return at + "project"
    return at + ("row.fp32" if tables is not None and tables.bits == 16 else "row")


def gated_name(layer: int) -> str:
    """What the graph calls the input of the down projection."""
    return f"layers.{layer}.product"


def _vectors(
    task: TextTask, layers: list[int], threads: int | None, show: bool | None
) -> dict[str, F32]:
    """Name in the graph -> vectors [chosen, d_ff]."""
    bundle, model = task.bundle, task.bundle.manifest.model
    names = {layer: [up_name(bundle, layer), gated_name(layer)] for layer in layers}
    wanted = {
        graph: [name for layer in numbers if layer in names for name in names[layer]]
        for graph, numbers in io.layer_graphs(model).items()
    }
    tables = bundle.manifest.tables
    record = tables.record_nbytes if tables is not None else 0  # what a token looks up
    shape = (len(task.chosen), model.d_ff)
    found = {name: np.empty(shape, np.float32) for each in names.values() for name in each}
    graphs = TappedGraphs(bundle, wanted, threads)
    with (
        open_tables(bundle.file(TABLES)) as rows,
        Progress(len(task.token_ids) * record, "running the text", show) as progress,
    ):
        for ids, places, chosen in _windows(task):
            for name, values in graphs.run(ids, rows).items() if len(chosen) else ():
                found[name][places] = values[chosen]
            progress.advance(len(ids) * record)
    del graphs
    return_freed_memory()
    return found


def _windows(task: TextTask) -> Iterator[tuple[I64, slice, I64]]:
    """Ids of a window; which of the chosen positions are in it, and where there."""
    size = window(task.bundle.manifest.model)
    for start in range(0, len(task.token_ids), size):
        ids = task.token_ids[start : start + size]
        first, last = np.searchsorted(task.chosen, [start, start + len(ids)]).tolist()
        yield ids, slice(first, last), task.chosen[first:last] - start


class TappedGraphs:
    """The graphs that decode, but for the head, each with further outputs.

    outputs: graph -> names of values in it. Raises BackendError if a graph has no such value.
    """

    def __init__(self, bundle: Bundle, outputs: dict[str, list[str]], threads: int | None) -> None:
        check_installed(bundle, "onnxruntime")
        self._bundle, self._outputs = bundle, outputs
        self._sessions = {
            name: _open(bundle, name, outputs.get(name, []), threads or usable_cpus())
            for name in (io.EMBED, *io.layer_graphs(bundle.manifest.model))
        }

    def run(self, token_ids: I64, tables: Tables) -> dict[str, F32]:
        """Name -> values [T, width] at all positions of one context. Raises BackendError."""
        feeds = self._feeds(token_ids, tables)
        hidden, found = io.NEW + io.HIDDEN, dict[str, F32]()
        for name, session in self._sessions.items():
            wanted = [hidden, *self._outputs.get(name, [])]
            inputs = {each.name: feeds[each.name] for each in session.get_inputs()}
            try:
                values = session.run(wanted, inputs)
            except Exception as error:  # onnxruntime's classes share no base
                raise BackendError(
                    f"{self._bundle.path}: the backbone ({name}) failed: {error}"
                ) from error
            feeds[io.HIDDEN] = values[0]
            found |= {name: value[0] for name, value in zip(wanted[1:], values[1:], strict=True)}
        return found

    def _feeds(self, token_ids: I64, tables: Tables) -> Feeds:
        """The inputs of all graphs, from an empty context."""
        config, count = self._bundle.manifest.model, len(token_ids)
        width = io.head_width(config)
        padding = ((0, 0), (0, (width - config.head_dim) // 2))
        cos, sin = (np.pad(table, padding) for table in rope_tables(config, count))
        distinct, slots = np.unique(token_ids, return_inverse=True)
        feeds: Feeds = {
            io.TOKEN_IDS: token_ids[None],
            io.SLOT_IDS: slots.astype(np.int64).reshape(1, -1),
            io.SEQLENS_K: np.array([count - 1], np.int32),
            io.TOTAL_LENGTH: np.array(count, np.int32),
            io.ROPE_COS: cos,
            io.ROPE_SIN: sin,
        }
        empty = np.zeros((1, config.n_kv_heads, count, width), np.float32)
        for layer in range(config.n_layers):
            feeds |= {f"{io.KEYS}{layer}": empty, f"{io.VALUES}{layer}": empty}
        return feeds | _row_feeds(distinct, tables)


def _row_feeds(token_ids: I64, tables: Tables) -> Feeds:
    """Rows of tokens as slots, one a token in this order."""
    layout, records = tables.layout, tables.records(token_ids)
    feeds: Feeds = {}
    for index, layer in enumerate(layout.layers):
        feeds[io.row_codes(layer)] = np.ascontiguousarray(layout.row_codes(records, index))
        if layout.quantized:
            scales = layout.row_scales(records, index)
            feeds[io.row_scales(layer)] = np.ascontiguousarray(scales, np.float32)
    if layout.quantized:
        feeds[io.ROW_ZERO_POINTS] = layout.zero_points(len(records))
    return feeds


def _open(bundle: Bundle, name: str, outputs: list[str], threads: int) -> ort.InferenceSession:
    manifest = bundle.manifest
    graph = decoding(manifest.model, manifest.tables, format_of(bundle)).graphs[name]
    for output in outputs:
        graph.output(output, np.float32, None)
    return open_session(GraphSource(name, encode(graph), bundle.path), threads, [CPU])
