"""Emits Engram modules as graph nodes: a token's n-gram rows are gated, convolved and added.

The context stores the convolution's inputs in `conv.<l>`, one row per token, like keys and values. A step
writes the rows of its tokens and reads earlier rows. So a context can be rewound, cached and copied at any
token, whatever the sizes of the steps were.
"""

from __future__ import annotations

import numpy as np

from stem_edge.graph import names as io
from stem_edge.graph.ffn import gathered
from stem_edge.graph.ir import CONTRIB, ElementType
from stem_edge.graph.layer import LayerGraph
from stem_edge.numerics.ngrams import LEAST_GATE

FLOAT, FLOAT16, INT64 = map(int, (ElementType.FLOAT, ElementType.FLOAT16, ElementType.INT64))

PLACES = "conv.places"


def with_engram(layer: LayerGraph, x: str) -> str:
    """Emit the sum of x [B, T, dim] and the tokens' gated and convolved n-gram rows."""
    graph, at, config = layer.graph, layer.at + "engram", layer.config
    both = layer.product("project", "project", _rows(layer), ("project",))
    keys, values = at + ".keys", at + ".values"
    graph.node("Split", [both], [keys, values], axis=-1, num_outputs=2)
    gate = _gate(layer, _normed(layer, "query", x), _normed(layer, "key", keys))
    gated = graph.add("Mul", [values, gate], at + ".gated")
    if config.engram_kernel:
        convolved = _convolved(layer, _normed(layer, "conv", gated))
        gated = graph.add("Add", [gated, convolved], at + ".delta")
    return graph.add("Add", [x, gated], at)


def _normed(layer: LayerGraph, name: str, x: str) -> str:
    part = f"engram_{name}_norm"
    return layer.rms_norm(layer.at + part, x, part, layer.config.norm_eps)


def _rows(layer: LayerGraph) -> str:
    """Emit each token's n-gram rows for this layer, joined: [B, T, number of rows * row width]."""
    config, first = layer.config, layer.config.row_layers[0]
    number, layers = config.stem_layers.index(layer.number), len(config.stem_layers)
    every = gathered(layer) if _is_first(layer) else f"layers.{first}.row.joined"
    if layers == 1:
        return every
    width = config.lookups // layers * config.row_rank
    return layer.graph.cut(every, number * width, (number + 1) * width, 1, layer.at + "row.own")


def _gate(layer: LayerGraph, query: str, keys: str) -> str:
    """Emit the gate [B, T, 1], from each token's dot product of key and query [B, T, dim]."""
    graph, at, dim = layer.graph, layer.at + "engram.gate", layer.config.dim
    # A product of matrices for each token: its sum does not depend on how many tokens there are.
    across = graph.reshape(query, [0, 0, 1, dim], at + ".query")
    down = graph.reshape(keys, [0, 0, dim, 1], at + ".keys")
    dots = graph.reshape(graph.add("MatMul", [across, down], at + ".dots"), [0, 0, 1], at + ".dot")
    dot = graph.add("Mul", [dots, graph.float(dim**-0.5)], at + ".match")
    size, sign = (graph.add(op, [dot], f"{at}.{op}") for op in ("Abs", "Sign"))
    size = graph.add("Max", [size, graph.float(LEAST_GATE)], at + ".size")
    signed = graph.add("Mul", [sign, graph.add("Sqrt", [size], at + ".root")], at + ".signed")
    return graph.add("Sigmoid", [signed], at)


def _convolved(layer: LayerGraph, normed: str) -> str:
    """Emit SiLU of the causal convolution of `normed` [B, T, dim]; save `normed` for the next step's convolution."""
    graph, config, at = layer.graph, layer.config, layer.at + "engram.conv"
    if _is_first(layer):
        _emit_places(layer, normed)
    dtype = layer.kv.cache.of_conv
    shape: list[int | str] = [graph.sequences, 1, "conv_capacity", config.dim]
    before = graph.input(f"{io.CONV}{layer.number}", dtype, shape)
    after = graph.output(f"{io.NEW}{io.CONV}{layer.number}", dtype, shape)
    half = dtype == np.float16
    stored = graph.add("Cast", [normed], at + ".stored", to=FLOAT16) if half else normed
    graph.add("ScatterND", [before, PLACES, stored], after)
    total = ""
    for tap, ago in enumerate(_distances(layer)):
        name, row = f"{at}.{tap}", _row(ago)
        found = graph.add("GatherND", [after, row], name + ".found", batch_dims=1)
        found = graph.add("Cast", [found], name + ".fp32", to=FLOAT) if half else found
        found = graph.add("Mul", [found, row + ".known"], name + ".known") if ago else found
        part = graph.add("Mul", [found, layer.vector(f"engram_conv_{tap}")], name)
        total = graph.add("Add", [total, part], name + ".sum") if total else part
    return graph.node("QuickGelu", [total], [at], CONTRIB, alpha=1.0)


def _distances(layer: LayerGraph) -> list[int]:
    """Return each convolution input's distance in tokens from the current token, longest first."""
    config = layer.config
    return [ago * config.ngram_order for ago in reversed(range(config.engram_kernel))]


def _emit_places(layer: LayerGraph, x: str) -> None:
    """Emit which rows of the caches `conv.<l>` [B, 1, rows, dim] belong to x's tokens [B, T, dim].

    All Engram layers share these values. PLACES [B, T, 3]: the token's index (sequence, 0, row).
    _row(n) [B, T, 2]: the index (0, row), within the sequence, of the token n tokens earlier.
    _row(n) + ".known" [B, T, 1]: 1 if there is such an earlier token, else 0.
    """
    graph = layer.graph
    zero, one = (graph.constant(f"int64.{n}", np.array(n, np.int64)) for n in (0, 1))

    def numbers(first: str, last: str) -> str:
        return graph.add("Range", [first, last, one], f"{last}.from.{first}")

    filled = graph.input(io.SEQLENS_K, np.int32, [graph.sequences])  # tokens in context - 1
    shape = graph.add("Shape", [x], PLACES + ".shape", start=0, end=2)
    sizes = graph.node("Split", [shape], [PLACES + ".b", PLACES + ".t"], num_outputs=2)
    sequences, tokens = (
        graph.add("Squeeze", [size], size + ".size") for size in (sizes, PLACES + ".t")
    )
    ends = graph.add("Cast", [filled], PLACES + ".last", to=INT64)
    ends = graph.add("Unsqueeze", [ends, graph.sizes([1, 2])], PLACES + ".lasts")
    first = graph.add("Sub", [one, tokens], PLACES + ".first")
    ago = graph.add("Unsqueeze", [numbers(first, one), graph.sizes([1])], PLACES + ".ago")
    rows = graph.add("Add", [ends, ago], PLACES + ".rows")
    none = graph.add("Sub", [rows, rows], PLACES + ".none")
    for distance in _distances(layer):
        name, back = _row(distance), graph.constant(f"int64.{distance}", np.array(distance))
        before = graph.add("Sub", [rows, back], name + ".before") if distance else rows
        if distance:
            exists = graph.add("GreaterOrEqual", [before, zero], name + ".exists")
            graph.add("Cast", [exists], name + ".known", to=FLOAT)
            before = graph.add("Max", [before, zero], name + ".there")
        graph.add("Concat", [none, before], name, axis=2)
    number = graph.add("Unsqueeze", [numbers(zero, sequences), graph.sizes([1, 2])], PLACES + ".of")
    number = graph.add("Add", [number, none], PLACES + ".number")
    graph.add("Concat", [number, _row(0)], PLACES, axis=2)


def _row(ago: int) -> str:
    return f"conv.row{ago}"


def _is_first(layer: LayerGraph) -> bool:
    """Return True for the first Engram layer, which emits the values that all modules share."""
    return layer.number == layer.config.row_layers[0]
