"""Emits a layer's FFN as graph nodes, for every kind of FFN except experts.

A new kind of FFN is an entry in layers.FFN_TERMS, or a function here.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from stem_edge.graph import names as io
from stem_edge.graph.layer import LayerGraph
from stem_edge.graph.linear import gather_blocks
from stem_edge.layers import FFN_TERMS
from stem_edge.tables.rows import RecordLayout


def ffn(layer: LayerGraph, x: str) -> str:
    """Emit a layer's FFN: normed hidden states x [B, T, dim] -> [B, T, dim]."""
    takes_row = any("row" in terms for terms in FFN_TERMS[layer.kind].values())
    row = row_of(layer, x) if takes_row else ""
    gate = _sum(layer, "gate", x, row)
    if layer.shape.sparsity:
        from stem_edge.graph.parts.ffn_parts import sparse  # only for such layers

        gate = sparse(layer, gate)
    gate = layer.activated(gate, "silu")
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
        from stem_edge.graph.parts.ffn_parts import weighted  # only for such layers

        parts = weighted(layer, parts, name)
    return layer.graph.node("Add", parts, [f"{layer.at}{name}.sum"])


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
        from stem_edge.graph.parts.ffn_parts import mixture  # only for such models

        row = mixture(layer, x, row, layout.row_width)
    if layer.config.ngram_order:  # a token's rows become one, side by side
        row = graph.reshape(row, [0, 0, layer.config.lookups * layout.row_width], name + ".joined")
    return row


def rows_layout(layer: LayerGraph) -> RecordLayout:
    if layer.layout is None:
        raise ValueError(f"layer {layer.number} takes rows, but there is no layout of rows")
    return layer.layout
