"""N-gram embeddings as graph nodes: the mean of a token's embedding and its n-gram rows."""

from __future__ import annotations

from stem_edge.graph.ffn import row_of
from stem_edge.graph.layer import LayerGraph


def with_ngrams(layer: LayerGraph, x: str) -> str:
    """Emit the mean [B, T, dim] of x and the tokens' projected n-gram rows."""
    graph, at = layer.graph, layer.at + "ngrams"
    total = graph.add("Add", [x, row_of(layer)], at + ".sum")
    share = graph.float(1 / (1 + layer.config.lookups))
    return graph.add("Mul", [total, share], at)
