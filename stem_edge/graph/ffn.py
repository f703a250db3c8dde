"""Emits a layer's FFN as graph nodes, for every kind of FFN except experts.

A new kind of FFN is an entry in layers.FFN_TERMS, or a function here.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from stem_edge.graph import names as io
from stem_edge.graph.ir import CONTRIB
from stem_edge.graph.layer import LayerGraph
from stem_edge.graph.linear import gather_blocks
from stem_edge.layers import FFN_TERMS
from stem_edge.tables.rows import RecordLayout


def ffn(layer: LayerGraph, x: str) -> str:
    """Emit a layer's FFN: normed hidden states x [B, T, dim] -> [B, T, dim]."""
    takes_row = any("row" in terms for terms in FFN_TERMS[layer.kind].values())
    row = row_of(layer, x) if takes_row else ""
    gate = _sum(layer, "gate", x, row)
    gate = layer.activated(_cut(layer, gate) if layer.shape.sparsity else gate, "silu")
    up = _sum(layer, "up", x, row)
    product = layer.graph.node("Mul", [gate, up], [layer.at + "product"])
    return layer.product("down", "down", product, ("down",))


def _sum(layer: LayerGraph, name: Literal["gate", "up"], x: str, row: str) -> str:
    """Emit the FFN's gate or up (`name`): W x, a table row, or their sum (FFN_TERMS)."""
    terms = FFN_TERMS[layer.kind][name]
    parts = [layer.product(name, name, x, (name,))] if "matrix" in terms else []
    parts += [row] if "row" in terms else []
    if len(parts) == 1:
        return parts[0]
    if "mix" in terms:
        parts = _weighted(layer, parts, name)
    return layer.graph.node("Add", parts, [f"{layer.at}{name}.sum"])


def _weighted(layer: LayerGraph, parts: list[str], name: str) -> list[str]:
    """Emit W x * (1 - s) and row * s for a trained share s. parts: names of W x and row."""
    graph, at, number = layer.graph, layer.at + name, layer.vector("mix")
    numbers = graph.add("Neg", [number], f"{at}.mix.negative"), number
    shares = [graph.add("Sigmoid", [one], f"{one}.share") for one in numbers]
    return [
        graph.add("Mul", [part, share], f"{share}.of.{name}")
        for part, share in zip(parts, shares, strict=True)
    ]


def _cut(layer: LayerGraph, gate: str) -> str:
    """Emit a sparse gate [B, T, d_ff]: relu(gate - mean - cutoff * std), mean and std over d_ff."""
    graph, at, axis = layer.graph, layer.at + "cut", layer.graph.sizes([-1])
    mean = graph.add("ReduceMean", [gate, axis], at + ".mean", keepdims=1)
    above = graph.add("Sub", [gate, mean], at + ".above")
    # The standard deviation is the L2 norm over sqrt(d_ff).
    length = graph.add("ReduceL2", [above, axis], at + ".length", keepdims=1)
    share = graph.float(layer.shape.cutoff / layer.shape.d_ff**0.5)
    least = graph.add("Mul", [length, share], at + ".least")
    return graph.add("Relu", [graph.add("Sub", [above, least], at + ".rest")], at)


def row_of(layer: LayerGraph, x: str = "") -> str:
    """Emit the tokens' table rows [B, T, width], projected to full width if tables have low rank.

    x: hidden states, needed only in models whose router mixes several rows of each token.
    """
    row = gathered(layer, x)
    return layer.product("project", "project", row, ("project",)) if layer.config.row_rank else row


def gathered(layer: LayerGraph, x: str = "") -> str:
    """Emit the tokens' rows, gathered from the row cache's slots, as float32 [B, T, row width]."""
    graph, layout, name = layer.graph, rows_layout(layer), layer.at + "row"
    # No shapes, because shape inference of GatherBlockQuantized refuses a symbolic number of slots.
    codes = graph.input(io.row_codes(layer.number), layout.codes_dtype, None)
    if layout.quantized:
        scales = graph.input(io.row_scales(layer.number), np.float32, None)
        names = [codes, scales, io.ROW_ZERO_POINTS]
        row = gather_blocks(graph, names, layer.slot_ids, name, layout.bits, layout.group_size)
    else:
        row = graph.node("Gather", [codes, layer.slot_ids], [name])
        row = graph.node("Cast", [row], [name + ".fp32"], to=1) if layout.bits == 16 else row
    if layer.config.row_window:
        means = graph.add("MatMul", [io.ROW_SHARES, row], name + ".means")
        bounds = [graph.sizes([number]) for number in (0, -1, 1)]  # all tokens but the last
        row = graph.add("Slice", [means, *bounds], name + ".mean")
    if layer.config.row_experts:
        row = _mixture(layer, x, row)
    if layer.config.ngram_order:  # a token's rows become one, side by side
        row = graph.reshape(row, [0, 0, layer.config.lookups * layout.row_width], name + ".joined")
    return row


def _mixture(layer: LayerGraph, x: str, rows: str) -> str:
    """Sum a token's k rows: [B, T, k * width] -> [B, T, width], with weights softmax(router x)."""
    graph, at, count = layer.graph, layer.at + "row.mixture", layer.config.row_experts
    width, router = rows_layout(layer).row_width // count, layer.matrix("router")
    scores = graph.node("FusedMatMul", [x, router], [at + ".scores"], CONTRIB, transB=1)
    shares = graph.add("Softmax", [scores], at + ".shares", axis=-1)
    shares = graph.reshape(shares, [0, 0, 1, count], at + ".line")
    rows = graph.reshape(rows, [0, 0, count, width], at + ".rows")
    # One small product per token, so that its bits do not depend on the number of tokens.
    mixed = graph.add("MatMul", [shares, rows], at + ".mixed")
    return graph.reshape(mixed, [0, 0, width], at)


def rows_layout(layer: LayerGraph) -> RecordLayout:
    if layer.layout is None:
        raise ValueError(f"layer {layer.number} takes rows, but there is no layout of rows")
    return layer.layout
