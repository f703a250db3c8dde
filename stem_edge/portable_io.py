"""Inputs and outputs of the portable variant of the graphs: stem_edge.graph_io says what they mean.

Sizes of a step: T tokens, P places that the runtime keeps for those before, n wanted logits.
"""

from __future__ import annotations

from stem_edge import graph_io as io
from stem_edge.config import ModelConfig
from stem_edge.graph_io import Shape, Value, Values
from stem_edge.rows import RecordLayout

F32, I64 = "float32", "int64"
SEEN = "P+T"  # places that scores are of: those before, then those of the step


def mask_name(window: int) -> str:
    """Input that holds the mask of layers with a window of this width."""
    return f"{io.MASK}{window}"


def row_name(layer: int) -> str:
    """Input that holds the rows of a STEM layer."""
    return f"{io.ROW}{layer}"


def portable_inputs(graph: str, config: ModelConfig, layout: RecordLayout | None) -> Values:
    """Name -> type and shape of everything that a graph takes, declared just so."""
    if graph == io.EMBED:
        return {io.TOKEN_IDS: Value(I64, (1, "T"))}
    values = {io.HIDDEN: Value(F32, (1, "T", config.dim))}
    if graph == io.HEAD:
        return values | {io.WANTED: Value(I64, ("n",))}
    layers = io.layer_graphs(config).get(graph, range(0))
    half = io.head_width(config) // 2
    values |= dict.fromkeys((io.ROPE_COS, io.ROPE_SIN), Value(F32, ("T", half)))
    for layer in layers:
        values[mask_name(config.window(layer))] = Value(F32, ("T", SEEN))
        values |= {f"{name}{layer}": _cache(config, "P") for name in (io.KEYS, io.VALUES)}
        if layout is not None and layer in config.stem_layers:
            values[row_name(layer)] = Value(F32, (1, "T", layout.row_width))
    return values


def portable_outputs(graph: str, config: ModelConfig) -> Values:
    """Name -> type and shape of everything that a graph gives."""
    if graph == io.HEAD:
        return {io.LOGITS: Value(F32, (1, "n", config.vocab_size))}
    values = {io.NEW + io.HIDDEN: Value(F32, (1, "T", config.dim))}
    for layer in io.layer_graphs(config).get(graph, range(0)):
        values |= {f"{io.NEW}{n}{layer}": _cache(config, "T") for n in (io.KEYS, io.VALUES)}
    return values


def _cache(config: ModelConfig, tokens: str) -> Value:
    shape: Shape = (1, config.n_kv_heads, tokens, io.head_width(config))
    return Value(F32, shape)
