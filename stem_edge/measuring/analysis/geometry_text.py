"""Activations in the FFNs of a bundle on a text: figure 6 b and c of the STEM paper.

The beginning of a text runs through the decoding graph, in windows, on onnxruntime. Two vectors of
each layer are kept at the chosen positions: the output of the up projection, or the row in its place,
and the input of the down projection, SiLU(gate) * up. Of layers with per-layer embeddings, the row
and its gated sum with the context take their place: a row adds to hidden states as an up projection
does, but after the FFN.

One position is chosen for each distinct token, because all positions of a token have the same row: in
STEM layers their cosines would all be 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from stem_edge.bundle.manifest import TABLES
from stem_edge.bundle.opening import Bundle
from stem_edge.bundle.table_arrays import open_tables
from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError, InputError
from stem_edge.export.backbone.whole import whole
from stem_edge.graph import names as io
from stem_edge.measuring.analysis.geometry_rows import Spread, random_p95, spread
from stem_edge.measuring.run.workload import read_ids
from stem_edge.numerics.quantize import F32, I64
from stem_edge.progress import Progress
from stem_edge.runtime.backends.engines import check_installed
from stem_edge.runtime.backends.onnxruntime.loaded import padded_ropes
from stem_edge.runtime.backends.onnxruntime.providers.graphs import format_of, graph_source
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU
from stem_edge.runtime.backends.onnxruntime.providers.session import open_session
from stem_edge.system.memory import return_freed_memory, usable_cpus

POSITIONS = 4096  # most tokens of the text that are run
WINDOW = 256  # tokens of a context
KEPT_NBYTES = 512 << 20  # for the vectors of all layers
Feeds = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class FfnGeometry:
    """The FFN of a layer at the chosen positions."""

    layer: int
    kind: str  # a key of FFN_TERMS, "dense" or that of a layer with rows
    up: Spread | None  # dense layers: of W_up x; layers with rows: of these
    gated: Spread | None  # of the input of the next projection, SiLU(gate) * up or the like


@dataclass(frozen=True)
class TextGeometry:
    """Geometry of activations on a text."""

    file: str
    positions: int  # of the text that were run
    window: int  # most tokens of a context
    chosen: int  # positions whose vectors were compared, each of another token
    random_p95_abs: float  # P95 |cos| of random directions as wide as these vectors
    layers: tuple[FfnGeometry, ...]


def text_geometry(
    bundle: Bundle,
    file: Path,
    stem_layers: list[int],
    sample: int,
    seed: int,
    threads: int | None,
    show: bool | None,
) -> TextGeometry:
    """Run the beginning of a text, and compare vectors of all dense layers and of these STEM layers.

    Raises InputError for a bundle without a backbone for onnxruntime or a text too short,
    BackendError.
    """
    model = bundle.manifest.model
    if bundle.manifest.backbone is None:
        raise InputError(
            f"{bundle.path}: activations on a text need the backbone for onnxruntime, and this "
            "bundle has one for ggml only; add it with: stem-edge export CHECKPOINT "
            f"{bundle.path} --engine onnx --add"
        )
    ids = np.array(read_ids(file, bundle, POSITIONS), np.int64)
    kept = KEPT_NBYTES // (2 * 4 * _width(model) * model.n_layers)  # two float32 vectors a layer
    chosen = choose(ids, max(2, min(sample, kept)), seed)
    if len(chosen) < 2:
        raise InputError(
            f"{file}: has {len(chosen)} distinct tokens of {bundle.path}, expected at least 2 to "
            "compare, better some hundreds; give a longer text"
        )
    dense = set(range(model.n_layers)) - set(model.stem_layers)
    layers = sorted([*dense, *stem_layers])
    found = vectors(bundle, ids, chosen, layers, threads, show)
    compared = []
    for layer in layers:  # popped, so that the memory of each vector is free for the next spread
        up, gated = (spread(found.pop(name)) for name in _names(model, layer))
        compared.append(FfnGeometry(layer, model.ffn_kind(layer), up, gated))
    return TextGeometry(
        file=str(file),
        positions=len(ids),
        window=min(WINDOW, model.max_context),
        chosen=len(chosen),
        random_p95_abs=random_p95(_width(model)),
        layers=tuple(compared),
    )


def choose(token_ids: I64, count: int, seed: int) -> I64:
    """Draw a position for each of up to `count` distinct tokens; return them in ascending order."""
    random = np.random.default_rng(seed)
    order = random.permutation(len(token_ids))
    _, first = np.unique(token_ids[order], return_index=True)
    return np.sort(random.permutation(order[first])[:count])


def _width(model: ModelConfig) -> int:
    """Return the width of the vectors; all layers of a model have the same."""
    return model.ple_width or model.d_ff


def _names(model: ModelConfig, layer: int) -> tuple[str, str]:
    """Return the names of a layer's vectors in the graph: up projection or row, and gated."""
    at = f"layers.{layer}."
    if layer not in model.stem_layers:
        up = at + ("up.biased" if "up" in model.biases else "up")
    else:
        up = at + "project" if model.row_rank else io.row_name(layer)
    return up, at + ("ple.product" if model.ple_width else "product")


def vectors(
    bundle: Bundle,
    token_ids: I64,
    chosen: I64,
    layers: list[int],
    threads: int | None,
    show: bool | None,
) -> dict[str, F32]:
    """Return name in the graph -> vectors [chosen, width], for all names of the layers."""
    model, tables = bundle.manifest.model, bundle.manifest.tables
    names = [name for layer in layers for name in _names(model, layer)]
    found = {name: np.empty((len(chosen), _width(model)), np.float32) for name in names}
    session = _open(bundle, names, threads or usable_cpus())
    wanted = [each.name for each in session.get_outputs()]
    size = min(WINDOW, model.max_context)
    record = tables.record_nbytes if tables is not None else 0  # bytes that a token looks up
    with (
        open_tables(bundle.file(TABLES)) as rows,
        Progress(len(token_ids) * record, "running the text", show) as progress,
    ):
        for start in range(0, len(token_ids), size):
            ids = token_ids[start : start + size]
            feeds = _feeds(model, ids)
            feeds |= {io.row_name(n): rows[ids, n][None] for n in model.stem_layers}
            first, last = np.searchsorted(chosen, [start, start + len(ids)]).tolist()
            for name, values in (feeds | _run(bundle, session, wanted, feeds)).items():
                if name in found:
                    found[name][first:last] = values[0, chosen[first:last] - start]
            progress.advance(len(ids) * record)
    del session
    return_freed_memory()
    return found


def _open(bundle: Bundle, names: list[str], threads: int) -> ort.InferenceSession:
    """Open the model's graph up to these values, which become its outputs; rows are inputs."""
    check_installed(bundle, "onnxruntime")
    graph = whole(bundle.manifest.model, bundle.manifest.tables, format_of(bundle))
    graph.outputs.clear()
    for name in names:
        if name not in graph.inputs:
            graph.output(name, np.float32, None)
    needed, nodes = set(graph.outputs), graph.nodes
    graph.nodes = []
    for node in reversed(nodes):
        if not needed.isdisjoint(node.outputs):
            graph.nodes.insert(0, node)
            needed |= set(node.inputs)
    graph.inputs = {name: value for name, value in graph.inputs.items() if name in needed}
    return open_session(graph_source(bundle, "backbone", graph), threads, [CPU])


def _run(
    bundle: Bundle, session: ort.InferenceSession, wanted: list[str], feeds: Feeds
) -> dict[str, F32]:
    """Return name -> values [1, T, width] at all positions of a context. Raises BackendError."""
    inputs = {each.name: feeds[each.name] for each in session.get_inputs()}
    try:
        return dict(zip(wanted, session.run(wanted, inputs), strict=True))
    except Exception as error:  # any, because onnxruntime's exceptions share no base class
        raise BackendError(f"{bundle.path}: the backbone failed: {error}") from error


def _feeds(config: ModelConfig, token_ids: I64) -> Feeds:
    """Return the inputs except for rows, for an empty context."""
    count = len(token_ids)
    feeds: Feeds = {
        io.TOKEN_IDS: token_ids[None],
        io.SEQLENS_K: np.array([count - 1], np.int32),
        io.TOTAL_LENGTH: np.array(count, np.int32),
        **padded_ropes(config, count),
    }
    for number in range(config.own_kv_layers):
        layer = config.layer(number)
        empty = np.zeros((1, layer.n_kv_heads, count, io.head_width(layer)), np.float32)
        feeds |= {f"{io.KEYS}{number}": empty, f"{io.VALUES}{number}": empty}
    return feeds
