"""The backbone in ggml operators: embedding, the FFN of each kind of layer, whole layers, and head.

stem_edge.numerics.reference computes the same in numpy.
"""

from __future__ import annotations

import math

from stem_edge.config import ModelConfig
from stem_edge.ggml import types as ggml_types
from stem_edge.layers import FFN_TERMS
from stem_edge.runtime.backends.ggml.attention import attention
from stem_edge.runtime.backends.ggml.graph import GgmlGraph, Tensor
from stem_edge.runtime.backends.ggml.layer import GgmlLayer, rms_norm
from stem_edge.runtime.backends.ggml.weights import Weights


def ffn(layer: GgmlLayer, x: Tensor) -> Tensor:
    """Return W_down (activation(gate) * up) for x [dim, T]; gate and up are each W x, the token's row, or their sum."""
    if layer.kind == "hash-moe":
        return _expert(layer, x)
    sums: dict[str, Tensor] = {}
    for name, terms in FFN_TERMS[layer.kind].items():
        parts = [layer.product(name, x)] if "matrix" in terms else []
        parts += [_row(layer, x)] if "row" in terms else []
        if "mix" in terms:
            shares = 1 - layer.share, layer.share
            parts = [layer.graph.op("scale", *both) for both in zip(parts, shares, strict=True)]
        sums[name] = parts[0] if len(parts) == 1 else layer.graph.op("add", *parts)
    return layer.product("down", layer.gated(sums["gate"], sums["up"]))


def ple(layer: GgmlLayer, x: Tensor, norm: Tensor) -> Tensor:
    """Return the term of per-layer embeddings that is added to x [dim, T].

    It mixes the tokens' rows with the product of their embeddings and the matrix `ple_context`.
    norm: weight of the RMS norm of this product.
    """
    # The model divides this product, and later its sum with the row, by constants. The norms after
    # them cancel constants, so only their eps are scaled.
    graph, config, eps = layer.graph, layer.config, layer.config.norm_eps
    context = layer.product("ple_context", layer.inputs.embedded)
    context = rms_norm(graph, context, norm, eps * config.dim)
    mixed = graph.op("add", context, graph.op("scale", _row(layer, x), config.ple_scale))
    product = layer.gated(layer.product("ple_gate", x), mixed)
    return layer.norm("ple_post_norm", layer.product("ple_out", product), 2 * eps)


def _row(layer: GgmlLayer, x: Tensor) -> Tensor:
    """Return the tokens' rows [d_ff or ple_width, T] from row cache slots.

    x: hidden states, for models with a router that mixes several rows of a token.
    """
    graph, shares = layer.graph, layer.inputs.row_shares
    row = graph.op("get_rows", layer.slots[0], layer.inputs.slot_ids)
    if shares is not None:
        turned = graph.op("cont", graph.op("permute", row, 1, 0, 2, 3))
        row = graph.op("mul_mat", turned, shares)
    if layer.config.row_experts:
        row = _mixture(layer, x, row)
    return layer.product("project", row) if layer.config.row_rank else row


def _mixture(layer: GgmlLayer, x: Tensor, rows: Tensor) -> Tensor:
    """Return the weighted sum [width, T] of k rows [k * width, T]; the weights are softmax(router x)."""
    graph, count, tokens = layer.graph, layer.config.row_experts, layer.inputs.count
    width = math.prod(layer.config.row_parts()[0]) // count
    shares = graph.op("soft_max", layer.product("router", x))
    apart = graph.op("reshape_3d", rows, width, count, tokens)
    turned = graph.op("cont", graph.op("permute", apart, 1, 0, 2, 3))  # [k, width, T]
    mixed = graph.op("mul_mat", turned, graph.op("reshape_3d", shares, count, 1, tokens))
    return graph.op("reshape_2d", mixed, width, tokens)


def _expert(layer: GgmlLayer, x: Tensor) -> Tensor:
    """Return the output [dim, T] of each token's expert."""
    graph, config, count = layer.graph, layer.config, layer.inputs.count
    ids = graph.op("reshape_2d", layer.inputs.slot_ids, 1, count)
    inner, outer = layer.slots  # in `inner`, rows of W_gate and W_up alternate
    both = graph.op("mul_mat_id", inner, graph.op("reshape_3d", x, config.dim, 1, count), ids)
    pairs = graph.op("reshape_3d", both, 2, config.d_ff, count)
    step, token = 2 * ggml_types.F32.nbytes, 2 * config.d_ff * ggml_types.F32.nbytes
    split = []
    for start in (0, ggml_types.F32.nbytes):
        view = graph.op("view_3d", pairs, 1, config.d_ff, count, step, token, start)
        split.append(graph.op("reshape_3d", graph.op("cont", view), config.d_ff, 1, count))
    result = graph.op("mul_mat_id", outer, layer.gated(*split), ids)
    return graph.op("reshape_2d", result, config.dim, count)


def emit_embedding(graph: GgmlGraph, config: ModelConfig, weights: Weights, ids: Tensor) -> Tensor:
    """Return the embeddings [dim, T] of token ids I32 [T]."""
    x = graph.op("get_rows", weights.tensors["embedding"], ids)
    return x if config.embedding_scale == 1 else graph.op("scale", x, config.embedding_scale)


def emit_layer(layer: GgmlLayer, weights: Weights, x: Tensor) -> Tensor:
    """Return the hidden states [dim, T] after a layer whose input is x [dim, T]."""
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


def emit_head(
    graph: GgmlGraph, config: ModelConfig, weights: Weights, x: Tensor, count: int
) -> Tensor:
    """Return logits [V, count], before any soft cap, of hidden states x [dim, count]."""
    normed = rms_norm(graph, x, weights.tensors["norm"], config.norm_eps)
    logits = weights.product(graph, "head", normed, count)
    if "head" in config.biases:
        logits = graph.op("add", logits, weights.tensors["head.bias"])
    return logits
