"""Attention of one layer as operators of ggml; stem_edge.numerics.reference has the mathematics."""

from __future__ import annotations

import math

from stem_edge.ggml.library import ROPE_HALVES, ROPE_PAIRS
from stem_edge.runtime.backends.ggml.graph import Tensor
from stem_edge.runtime.backends.ggml.kv_cache import KvCache
from stem_edge.runtime.backends.ggml.layer import LayerGraph


def attention(layer: LayerGraph, x: Tensor, kv: KvCache) -> Tensor:
    """Return attention over x [dim, T], already normed, as [dim, T].

    A layer that borrows keys and values reads those that its lender has stored in this step.
    """
    graph, config, own = layer.graph, layer.config, layer.shape
    if own.kv_layer == layer.number:
        _store(layer, kv.keys[layer.number], _rotated(layer, "k", x, own.n_kv_heads))
        _store(layer, kv.values[layer.number], _values(layer, x))
    q = graph.op("permute", _rotated(layer, "q", x, config.n_heads), 0, 2, 1, 3)
    keys, values = (_stored(layer, all, kv) for all in (kv.keys, kv.values))
    mask, scale = layer.inputs.cells[own.window].mask, config.attention_scale or own.head_dim**-0.5
    mixed = graph.op("flash_attn_ext", q, keys, values, mask, scale, 0.0, 0.0)
    width, count = config.n_heads * own.head_dim, layer.inputs.count
    return layer.product("wo", graph.op("reshape_2d", mixed, width, count))


def _rotated(layer: LayerGraph, part: str, x: Tensor, heads: int) -> Tensor:
    """Return heads [head_dim, heads, T] of q or k after the norm, if there is one, and RoPE.

    Not by ggml's RoPE alone: it multiplies up its angles, whose error grows with the position.
    """
    graph, config, inputs = layer.graph, layer.config, layer.inputs
    cut = _heads(layer, layer.product("w" + part, x), heads)
    if config.qk_norm_eps is not None:
        cut = layer.norm(part + "_norm", cut, config.qk_norm_eps)
    mode, width = ROPE_PAIRS if config.rope_interleaved else ROPE_HALVES, layer.shape.head_dim
    quarter = (1.0, math.pi / 2, 0.0, 1.0, 0.0, 0.0)  # a turn by 90 degrees at position 1
    turned = graph.op("rope_ext", cut, inputs.ones, None, width, mode, 0, *quarter)
    cos, sin = (
        graph.op("reshape_3d", one, width, 1, inputs.count)
        for one in inputs.turns[layer.shape.rope]
    )
    return graph.op("add", graph.op("mul", cut, cos), graph.op("mul", turned, sin))


def _values(layer: LayerGraph, x: Tensor) -> Tensor:
    """Return values of all heads after the norm, if there is one."""
    product = layer.product("wv", x)
    if not layer.config.v_norm:
        return product
    cut = _heads(layer, product, layer.shape.n_kv_heads)
    return layer.graph.op("rms_norm", cut, layer.config.qk_norm_eps)


def _heads(layer: LayerGraph, x: Tensor, heads: int) -> Tensor:
    return layer.graph.op("reshape_3d", x, layer.shape.head_dim, heads, layer.inputs.count)


def _store(layer: LayerGraph, cache: Tensor, new: Tensor) -> None:
    """Store keys or values of all heads in the tokens' own cells."""
    graph, own, inputs = layer.graph, layer.shape, layer.inputs
    new = graph.op("reshape_2d", new, own.n_kv_heads * own.head_dim, inputs.count)
    # Must be emitted first: attention reads the cache itself, not the result of set_rows, so no
    # dependency orders the two.
    graph.emit(graph.op("set_rows", cache, new, inputs.cells[own.window].own))


def _stored(layer: LayerGraph, caches: list[Tensor], kv: KvCache) -> Tensor:
    """Return keys or values [head_dim, cells, n_kv_heads] of all cells that are attended to."""
    own = layer.shape
    head = kv.type.row_nbytes(own.head_dim)
    sizes = (own.head_dim, layer.inputs.cells[own.window].count, own.n_kv_heads)
    strides = (head * own.n_kv_heads, head)
    return layer.graph.op("view_3d", caches[own.kv_layer], *sizes, *strides, 0)
