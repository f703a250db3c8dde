"""Engram modules as graph nodes: a token's rows of n-grams, added by a gate, and convolved.

What the convolution adds up of earlier tokens lies in the context as keys and values do: a row for each
token, `conv.<l>`. A step writes its own rows and reads those it needs, so that a context can be taken
back, kept and copied as it is, whatever the steps were.
"""

from __future__ import annotations

import numpy as np

from stem_edge.graph import names as io
from stem_edge.graph.ffn import gathered
from stem_edge.graph.ir import CONTRIB, ElementType, Graph
from stem_edge.graph.layer import LayerGraph
from stem_edge.numerics.ngrams import LEAST_GATE

FLOAT, FLOAT16, INT64 = map(int, (ElementType.FLOAT, ElementType.FLOAT16, ElementType.INT64))


def with_engram(layer: LayerGraph, x: str) -> str:
    """Emit x [B, T, dim] with what the tokens' rows of n-grams change."""
    graph, at, config = layer.graph, layer.at + "engram", layer.config
    both = layer.product("project", "project", _rows(layer), ("project",))
    keys, values = at + ".keys", at + ".values"
    graph.node("Split", [both], [keys, values], axis=-1, num_outputs=2)
    query = layer.rms_norm(layer.at + "engram_query_norm", x, "engram_query_norm", config.norm_eps)
    keys = layer.rms_norm(layer.at + "engram_key_norm", keys, "engram_key_norm", config.norm_eps)
    gated = graph.add("Mul", [values, _gate(layer, query, keys)], at + ".gated")
    if config.engram_kernel:
        normed = layer.rms_norm(
            layer.at + "engram_conv_norm", gated, "engram_conv_norm", config.norm_eps
        )
        gated = graph.add("Add", [gated, _convolved(layer, normed)], at + ".delta")
    return graph.add("Add", [x, gated], at)


def _rows(layer: LayerGraph) -> str:
    """Emit the rows of this layer's tables [B, T, tables * width]; all layers' are gathered at once."""
    config, first = layer.config, layer.config.row_layers[0]
    number, layers = config.stem_layers.index(layer.number), len(config.stem_layers)
    every = gathered(layer) if layer.number == first else f"layers.{first}.row.joined"
    if layers == 1:
        return every
    width = config.lookups // layers * config.row_rank
    return layer.graph.cut(every, number * width, (number + 1) * width, 1, layer.at + "row.own")


def _gate(layer: LayerGraph, query: str, keys: str) -> str:
    """Emit the gate [B, T, 1] of keys and queries [B, T, dim]."""
    graph, at, dim = layer.graph, layer.at + "engram.gate", layer.config.dim
    # A product of matrices for each token: its sum does not depend on how many tokens there are.
    across = graph.reshape(query, [0, 0, 1, dim], at + ".query")
    down = graph.reshape(keys, [0, 0, dim, 1], at + ".keys")
    dots = graph.reshape(graph.add("MatMul", [across, down], at + ".dots"), [0, 0, 1], at + ".dot")
    dot = graph.add("Mul", [dots, graph.float(dim**-0.5)], at + ".match")
    size = graph.add(
        "Max", [graph.add("Abs", [dot], at + ".abs"), graph.float(LEAST_GATE)], at + ".size"
    )
    root = graph.add("Sqrt", [size], at + ".root")
    signed = graph.add("Mul", [graph.add("Sign", [dot], at + ".sign"), root], at + ".signed")
    return graph.add("Sigmoid", [signed], at)


def _convolved(layer: LayerGraph, normed: str) -> str:
    """Emit SiLU of the convolution of normed [B, T, dim], which joins the rows of the context."""
    graph, config, at = layer.graph, layer.config, layer.at + "engram.conv"
    dtype = layer.kv.cache.of_conv
    shape: list[int | str] = [graph.sequences, 1, "conv_capacity", config.dim]
    before = graph.input(f"{io.CONV}{layer.number}", dtype, shape)
    after = graph.output(f"{io.NEW}{io.CONV}{layer.number}", dtype, shape)
    half = dtype == np.float16
    stored = graph.add("Cast", [normed], at + ".stored", to=FLOAT16) if half else normed
    rows = _rows_of_step(layer)
    graph.add("ScatterND", [before, _places(graph, rows), stored], after)
    total = ""
    for tap in range(config.engram_kernel):
        ago, name = (config.engram_kernel - 1 - tap) * config.ngram_order, f"{at}.{tap}"
        row, known = _earlier(graph, rows, ago)
        found = graph.add("GatherND", [after, row], name + ".found", batch_dims=1)
        found = graph.add("Cast", [found], name + ".fp32", to=FLOAT) if half else found
        found = graph.add("Mul", [found, known], name + ".known")
        part = graph.add("Mul", [found, layer.vector(f"engram_conv_{tap}")], name)
        total = graph.add("Add", [total, part], name + ".sum") if total else part
    return graph.node("QuickGelu", [total], [at], CONTRIB, alpha=1.0)


def _rows_of_step(layer: LayerGraph) -> str:
    """Emit the rows of the context that this step's tokens take, int64 [B, T], once for all layers."""
    graph, name = layer.graph, "conv.rows"
    if not _emitted(graph, name):
        filled = graph.input(io.SEQLENS_K, np.int32, [graph.sequences])
        last = graph.add("Cast", [filled], name + ".last", to=INT64)
        last = graph.add("Unsqueeze", [last, graph.sizes([1])], name + ".lasts")
        tokens = graph.add("Shape", [layer.slot_ids], name + ".shape", start=1, end=2)
        one = graph.constant("int64.1", np.array(1, np.int64))
        first = graph.add(
            "Sub", [one, graph.add("Squeeze", [tokens], name + ".tokens")], name + ".first"
        )
        graph.add("Add", [last, graph.add("Range", [first, one, one], name + ".ago")], name)
    return name


def _places(graph: Graph, rows: str) -> str:
    """Emit the places [B, T, 3] of rows [B, T] in the memory of all sequences."""
    name = "conv.places"
    if not _emitted(graph, name):
        shape = graph.add("Shape", [rows], name + ".shape", start=0, end=1)
        count = graph.add("Squeeze", [shape], name + ".sequences")
        zero, one = (graph.constant(f"int64.{n}", np.array(n, np.int64)) for n in (0, 1))
        numbers = graph.add("Range", [zero, count, one], name + ".numbers")
        numbers = graph.add("Unsqueeze", [numbers, graph.sizes([1, 2])], name + ".number")
        within, _ = _earlier(graph, rows, 0)
        sequence = graph.add("Add", [numbers, within + ".head"], name + ".sequence")
        graph.add("Concat", [sequence, within], name, axis=2)
    return name


def _earlier(graph: Graph, rows: str, ago: int) -> tuple[str, str]:
    """Emit the places [B, T, 2] of rows so many tokens before, and whether they exist [B, T, 1]."""
    name, known = f"conv.ago{ago}", f"conv.ago{ago}.known"
    if not _emitted(graph, name):
        zero = graph.constant("int64.0", np.array(0, np.int64))
        back = graph.constant(f"int64.{ago}", np.array(ago, np.int64))
        row = graph.add("Sub", [rows, back], name + ".rows")
        row = graph.add("Unsqueeze", [row, graph.sizes([2])], name + ".row")
        exists = graph.add("GreaterOrEqual", [row, zero], name + ".exists")
        graph.add("Cast", [exists], known, to=FLOAT)
        row = graph.add("Max", [row, zero], name + ".there")
        head = graph.add("Sub", [row, row], name + ".head")
        graph.add("Concat", [head, row], name, axis=2)
    return name, known


def _emitted(graph: Graph, name: str) -> bool:
    return any(name in node.outputs for node in graph.nodes)
