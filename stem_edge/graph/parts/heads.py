"""Emits norms of attention heads, and attention inputs of layers that borrow keys and values."""

from __future__ import annotations

import numpy as np

from stem_edge.graph import names as io
from stem_edge.graph.layer import NORM, LayerGraph

NOTHING = "nothing."  # prefix of the names of empty keys and values (see no_tokens)


def borrowing(layer: LayerGraph, q: str) -> list[str]:
    """Emit q with normed heads, and empty k and v: another layer has filled the cache already."""
    nothing = no_tokens(layer, q)
    return [normed_heads(layer, "q", q, layer.config.n_heads), nothing, nothing]


def no_tokens(layer: LayerGraph, q: str) -> str:
    """Emit empty K or V [B, 0, size] from q [B, T, ...], for layers that read another layer's."""
    graph, size = layer.graph, layer.shape.n_kv_heads * io.head_width(layer.shape)
    name = f"{NOTHING}{size}"
    if not any(name in node.outputs for node in graph.nodes):
        bounds = [graph.sizes(sizes) for sizes in ([0, 0], [0, size], [1, 2])]
        graph.add("Slice", [q, *bounds], name)
    return name


def normed_heads(layer: LayerGraph, part: str, x: str, heads: int) -> str:
    """Emit norms of the heads of x [B, T, heads * width] if the model has them. part: q, k or v."""
    graph, config, own, at = layer.graph, layer.config, layer.shape, layer.at + part
    if config.qk_norm_eps is None or (part == "v" and not config.v_norm):
        return x
    width = io.head_width(own)
    cut = graph.reshape(x, [0, 0, heads, width], at + ".cut")
    # Zeros as padding lower the mean of squares by this factor, so eps must shrink alike; the
    # weight, which the exporter scales, makes up for the rest.
    eps = config.qk_norm_eps * own.head_dim / width
    if part == "v":
        ones = np.full(width, (own.head_dim / width) ** 0.5, np.float32)
        weight = graph.constant(f"v_norm.{own.head_dim}", ones)
        normed = graph.add(NORM, [cut, weight], at + ".scaled", axis=-1, epsilon=eps)
    else:
        normed = layer.rms_norm(at + "_norm", cut, f"{part}_norm", eps)
    return graph.reshape(normed, [0, 0, heads * width], at + ".normed")
