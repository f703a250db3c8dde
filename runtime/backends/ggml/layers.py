"""The model's layers, one after another, and its head, as operators of ggml.

stem_edge.numerics.reference shows their mathematics.
"""

from __future__ import annotations

from stem_edge.config import ModelConfig
from stem_edge.runtime.backends.ggml.attention import attention
from stem_edge.runtime.backends.ggml.ffn import ffn, ple
from stem_edge.runtime.backends.ggml.graph import Graph, Tensor
from stem_edge.runtime.backends.ggml.layer import LayerGraph, rms_norm
from stem_edge.runtime.backends.ggml.weights import Weights


def emit_embedding(graph: Graph, config: ModelConfig, weights: Weights, ids: Tensor) -> Tensor:
    """Return hidden states [dim, T] of token ids I32 [T]."""
    x = graph.op("get_rows", weights.tensors["embedding"], ids)
    return x if config.embedding_scale == 1 else graph.op("scale", x, config.embedding_scale)


def emit_layer(layer: LayerGraph, weights: Weights, x: Tensor) -> Tensor:
    """Return x [dim, T] after a layer."""
    graph, config = layer.graph, layer.config
    mixed = attention(layer, layer.norm("attention_norm", x))
    x = graph.op("add", x, layer.post_norm("attention_post_norm", mixed))
    result = ffn(layer, layer.norm("ffn_norm", x))
    x = graph.op("add", x, layer.post_norm("ffn_post_norm", result))
    if layer.kind == "ple":
        x = graph.op("add", x, ple(layer, x, weights.tensors["ple_norm"]))
    if config.layer_scale:
        x = graph.op("scale", x, weights.number(f"layers.{layer.number}.layer_scale"))
    return x


def emit_head(graph: Graph, config: ModelConfig, weights: Weights, x: Tensor, count: int) -> Tensor:
    """Return logits [V, count], before any soft cap, of hidden states x [dim, count]."""
    normed = rms_norm(graph, x, weights.tensors["norm"], config.norm_eps)
    logits = weights.product(graph, "head", normed, count)
    if "head" in config.biases:
        logits = graph.op("add", logits, weights.tensors["head.bias"])
    return logits
