"""Attention of one layer in ggml operators; stem_edge.numerics.reference computes the same in numpy."""

from __future__ import annotations

import math
from functools import reduce

from stem_edge.ggml import types as ggml_types
from stem_edge.ggml.library import ROPE_HALVES, ROPE_PAIRS
from stem_edge.ggml.types import TensorType
from stem_edge.runtime.backends.ggml.graph import Tensor
from stem_edge.runtime.backends.ggml.layer import GgmlLayer


def attention(layer: GgmlLayer, x: Tensor) -> Tensor:
    """Return the attention output [dim, T] for normed hidden states x [dim, T].

    A layer without keys and values of its own attends to an earlier layer's, in the KV cache.
    """
    graph, config, own, sequences = layer.graph, layer.config, layer.shape, layer.inputs.sequences
    if own.kv_layer == layer.number:
        keys, values = _rotated(layer, "k", x, own.n_kv_heads), _values(layer, x)
        for number, one in enumerate(sequences):
            _store(layer, number, one.kv.keys[layer.number], keys)
            _store(layer, number, one.kv.values[layer.number], values)
    q = _rotated(layer, "q", x, config.n_heads)
    mixed = [_mixed(layer, number, q) for number in range(len(sequences))]
    width = config.n_heads * own.head_dim
    lines = [graph.op("reshape_2d", one, width, layer.inputs.count // len(mixed)) for one in mixed]
    return layer.product("wo", reduce(lambda a, b: graph.op("concat", a, b, 1), lines))


def _rotated(layer: GgmlLayer, part: str, x: Tensor, heads: int) -> Tensor:
    """Return queries or keys [head_dim, heads, T] of x, after the QK norm, if any, and RoPE.

    part: "q" or "k". heads: their number. RoPE is cos * x + sin * (x turned by 90 degrees). ggml's RoPE operator does
    only the turn by 90 degrees, because it computes inaccurate angles at high positions.
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
        for one in inputs.rope_tables[layer.shape.rope]
    )
    return graph.op("add", graph.op("mul", cut, cos), graph.op("mul", turned, sin))


def _values(layer: GgmlLayer, x: Tensor) -> Tensor:
    """Return the values (v) of all heads, after the norm if the model has one."""
    product = layer.product("wv", x)
    if not layer.config.v_norm:
        return product
    cut = _heads(layer, product, layer.shape.n_kv_heads)
    return layer.graph.op("rms_norm", cut, layer.config.qk_norm_eps)


def _heads(layer: GgmlLayer, x: Tensor, heads: int) -> Tensor:
    return layer.graph.op("reshape_3d", x, layer.shape.head_dim, heads, layer.inputs.count)


def _store(layer: GgmlLayer, number: int, cache: Tensor, new: Tensor) -> None:
    """Add an operator that writes new keys or values of sequence `number` to its KV cache."""
    graph, own, inputs = layer.graph, layer.shape, layer.inputs
    width, each = own.n_kv_heads * own.head_dim, inputs.count // len(inputs.sequences)
    new = graph.columns(new, ggml_types.F32, width, number * each, each)
    cells = inputs.sequences[number].cells[own.window].own
    # Must be emitted first: attention reads the cache itself, not the result of set_rows, so no
    # dependency orders the two.
    graph.emit(graph.op("set_rows", cache, new, cells))


def _mixed(layer: GgmlLayer, number: int, q: Tensor) -> Tensor:
    """Return the attention output for the tokens of sequence `number`, as [head_dim, n_heads, tokens]."""
    graph, config, own, inputs = layer.graph, layer.config, layer.shape, layer.inputs
    one, each = inputs.sequences[number], inputs.count // len(inputs.sequences)
    head = own.head_dim * ggml_types.F32.nbytes
    token = head * config.n_heads
    place = number * each * token
    q = graph.op("view_3d", q, own.head_dim, each, config.n_heads, token, head, place)
    cells, scale = one.cells[own.window], config.attention_scale or own.head_dim**-0.5
    keys, values = (
        _stored(layer, caches[own.kv_layer], one.kv.type, cells.count)
        for caches in (one.kv.keys, one.kv.values)
    )
    return graph.op("flash_attn_ext", q, keys, values, cells.mask, scale, 0.0, 0.0)


def _stored(layer: GgmlLayer, cache: Tensor, kind: TensorType, cells: int) -> Tensor:
    """Return a view [head_dim, cells, n_kv_heads] of the first `cells` cells of a KV cache."""
    own = layer.shape
    head = kind.row_nbytes(own.head_dim)
    sizes, strides = (own.head_dim, cells, own.n_kv_heads), (head * own.n_kv_heads, head)
    return layer.graph.op("view_3d", cache, *sizes, *strides, 0)
