"""Mixtures of the rows of a token as graph nodes, by a router in the layer."""

from __future__ import annotations

from stem_edge.graph.ffn import rows_layout
from stem_edge.graph.ir import CONTRIB
from stem_edge.graph.layer import LayerGraph


def mixture(layer: LayerGraph, x: str, rows: str) -> str:
    """Emit the sum of rows [B, T, k * width] with the shares softmax(router x) -> [B, T, width]."""
    graph, at, count = layer.graph, layer.at + "row.mixture", layer.config.row_experts
    width = rows_layout(layer).row_width // count
    scores = graph.node(
        "FusedMatMul", [x, layer.matrix("router")], [at + ".scores"], CONTRIB, transB=1
    )
    shares = graph.add("Softmax", [scores], at + ".shares", axis=-1)
    shares = graph.reshape(shares, [0, 0, 1, count], at + ".line")
    rows = graph.reshape(rows, [0, 0, count, width], at + ".rows")
    # A product for each token, which so has the same bits alone and beside others.
    mixed = graph.add("MatMul", [shares, rows], at + ".mixed")
    return graph.reshape(mixed, [0, 0, width], at)
