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

import numpy as np

from stem_edge import graph_io as io
from stem_edge.bundle import TABLES, TOKENIZER, Bundle
from stem_edge.config import ModelConfig
from stem_edge.errors import InputError
from stem_edge.measuring.geometry_spread import Spread, random_p95, spread
from stem_edge.measuring.geometry_taps import TappedGraphs
from stem_edge.progress import Progress
from stem_edge.quantize import F32, I64
from stem_edge.runtime.text import TextCodec
from stem_edge.tables import open_tables

POSITIONS = 4096  # of the text's beginning, at most
WINDOW = 256  # tokens of a context: what a position sees of the text before it
KEPT_NBYTES = 512 << 20  # of vectors, all layers together
READ_CHARS = 1 << 16


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
    ids = _read_ids(bundle, file)
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
    with (
        TappedGraphs(bundle, wanted, threads) as graphs,
        open_tables(bundle.file(TABLES)) as rows,
        Progress(len(task.token_ids) * record, "running the text", show) as progress,
    ):
        for ids, places, chosen in _windows(task):
            for name, values in graphs.run(ids, rows).items() if len(chosen) else ():
                found[name][places] = values[chosen]
            progress.advance(len(ids) * record)
    return found


def _windows(task: TextTask) -> Iterator[tuple[I64, slice, I64]]:
    """Ids of a window; which of the chosen positions are in it, and where there."""
    size = window(task.bundle.manifest.model)
    for start in range(0, len(task.token_ids), size):
        ids = task.token_ids[start : start + size]
        first, last = np.searchsorted(task.chosen, [start, start + len(ids)]).tolist()
        yield ids, slice(first, last), task.chosen[first:last] - start


def _read_ids(bundle: Bundle, file: Path) -> I64:
    """The first POSITIONS token ids of a text, read no further than that takes."""
    codec, ids = TextCodec(bundle.file(TOKENIZER)), list[int]()
    try:
        with file.open(encoding="utf-8") as opened:
            while len(ids) < POSITIONS and (lines := opened.readlines(READ_CHARS)):
                ids += codec.encode("".join(lines), add_special_tokens=not ids)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot read ({error}); give a text in UTF-8") from None
    return np.array(ids[:POSITIONS], np.int64)
