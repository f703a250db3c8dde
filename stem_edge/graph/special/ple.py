"""Per-layer embeddings as graph nodes: a gated term that is added to a layer's result."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph.ffn import row_of
from stem_edge.graph.layer import LayerGraph, norm
from stem_edge.graph.linear import Products


def contexts(
    products: Products, config: ModelConfig, embedded: str, layers: Sequence[int]
) -> dict[int, str]:
    """Emit each layer's projection of `embedded`, which `ple` adds to rows; return layer -> name.

    Projections [B, T, ple_width] of embedded [B, T, dim] are normed and divided by sqrt(2).
    """
    graph, width = products.graph, config.ple_width
    at, names = f"layers.{layers[0]}.", [f"layers.{number}.ple_context" for number in layers]
    shape = (len(layers) * width, config.dim)
    x = products.product(at + "ple_context", "ple_context", embedded, tuple(names), shape)
    x = graph.reshape(x, [0, 0, len(layers), width], at + "context.cut")
    weight = products.vector(at + "ple_norm", width, ("ple_norm",))
    # The product is not divided by sqrt(dim), because it is normed anyway. So eps must be dim times as large.
    x = norm(graph, x, weight, config.norm_eps * config.dim)
    x = graph.add("Mul", [x, graph.float(0.5**0.5)], at + "context.half")
    x = graph.reshape(x, [0, 0, len(layers) * width], at + "context")
    parts = [f"layers.{number}.context.part" for number in layers]
    # num_outputs instead of sizes, because Split cannot read constants in the file of a prepared graph.
    graph.node("Split", [x], parts, axis=-1, num_outputs=len(layers))
    return dict(zip(layers, parts, strict=True))


def ple(layer: LayerGraph, x: str, context: str) -> str:
    """Emit per-layer embeddings to add to x [B, T, dim]. context: projected token embeddings."""
    graph, config, at = layer.graph, layer.config, layer.at + "ple"
    scale = graph.float(float(np.float32(config.ple_scale * 0.5**0.5)))
    row = graph.add("Mul", [row_of(layer), scale], at + ".row")
    mixed = graph.add("Add", [context, row], at + ".mixed")
    gate = layer.activated(layer.product("ple_gate", "ple_gate", x, ("ple_gate",)), "ple.gelu")
    product = graph.add("Mul", [gate, mixed], at + ".product")
    added = layer.product("ple_out", "ple_out", product, ("ple_out",))
    return layer.rms_norm(at + "_post_norm", added, "ple_post_norm", config.norm_eps)
