"""Emits attention of a layer: GroupQueryAttention nodes, which update the KV cache in place."""

from __future__ import annotations

import numpy as np

from stem_edge.graph import names as io
from stem_edge.graph.ir import CONTRIB
from stem_edge.graph.kv import KEYS, QUANTIZED, VALUES
from stem_edge.graph.layer import LayerGraph

QKV = ("wq", "wk", "wv")
SINK, K_SCALE = 11, 12  # indexes of the sinks of heads, and of the first input for quantized caches


def attention(layer: LayerGraph, x: str) -> str:
    """Emit a layer's attention: normed hidden states x [B, T, dim] -> [B, T, dim]."""
    config, own = layer.config, layer.shape
    # Cached keys of a window do not begin at position 0, so RoPE needs the positions.
    positions = [layer.positions] if layer.positions and own.window else []
    prefix = io.WINDOW if positions else ""
    updated = [f"{io.NEW}{name}{layer.number}" for name in (io.KEYS, io.VALUES)]
    borrowed = own.kv_layer != layer.number
    cached, updated = caches(layer, prefix, own.kv_layer, updated, borrowed=borrowed)
    lengths = [prefix + name for name in (io.SEQLENS_K, io.TOTAL_LENGTH)]
    inputs = [*projected(layer, x), *cached, *lengths, *io.rope_names(config, own), *positions]
    return attended(layer, inputs, updated, own.kv_layer, own.window)


def attended(
    layer: LayerGraph, inputs: list[str], updated: list[str], lender: int, window: int
) -> str:
    """Emit GroupQueryAttention and the output projection; return the projection [B, T, dim].

    inputs: inputs of the operator. updated: names of its cache outputs. lender: layer whose keys
    and values are read. window: number of tokens that attention sees; 0: all.
    """
    kv, attributes = layer.kv, dict[str, str | int]()
    if kv.type in QUANTIZED:
        inputs = inputs + [""] * (K_SCALE - len(inputs))
        inputs += [kv.scales(layer.graph, lender, what) for what in (KEYS, VALUES)]
        attributes = {f"{what}_quant_type": "PER_CHANNEL" for what in "kv"}
        attributes["kv_cache_bit_width"] = kv.cache.bits
    mixed = grouped(layer, inputs, updated, window, **attributes)
    return layer.product("wo", "wo", mixed, ("wo",))


def grouped(
    layer: LayerGraph,
    inputs: list[str],
    updated: list[str],
    window: int,
    **attributes: str | int,
) -> str:
    """Emit GroupQueryAttention; return the result's name. updated: names of cache outputs."""
    config, own = layer.config, layer.shape
    # Explicit, because the default depends on the head width, which may be padded.
    scale = config.attention_scale or own.head_dim**-0.5
    if layer.kv.unblocked:
        inputs, scale = _unblocked(layer, inputs, scale), 1.0
    return layer.graph.node(
        "GroupQueryAttention",
        inputs,
        [layer.at + "attended", *updated],
        CONTRIB,
        num_heads=config.n_heads,
        kv_num_heads=own.n_kv_heads,
        **{"do_rotary": 1, **attributes},
        rotary_interleaved=int(config.rope_interleaved),
        scale=scale,
        **({"local_window_size": window} if window else {}),
    )


def _unblocked(layer: LayerGraph, inputs: list[str], scale: float) -> list[str]:
    """Return attention inputs that make onnxruntime compute all scores of a head at once.

    For one query, it has AVX code only in this kernel, and only if the scale is 1. So q is scaled first.
    Sinks select the kernel; theirs is the least number, so that their weight is 0.
    """
    graph, own, heads, (q, k, *others) = layer.graph, layer.shape, layer.config.n_heads, inputs
    if scale != 1:
        sizes = [n * io.head_width(own) for n in (heads, 0 if k else 2 * own.n_kv_heads)]
        factors = np.repeat(np.array([scale, 1], np.float32), sizes)
        factor = graph.constant(f"factors.{scale!r}.{sizes}", factors)
        q = graph.add("Mul", [q, factor], layer.at + "q.scaled")
    sinks = graph.constant(f"sinks.{heads}", np.full(heads, np.finfo(np.float32).min, np.float32))
    return [q, k, *others, *[""] * (SINK - len(inputs)), sinks]


def caches(
    layer: LayerGraph, prefix: str, lender: int, updated: list[str], *, borrowed: bool
) -> tuple[list[str], list[str]]:
    """Declare a KV cache as graph inputs, and its new state as outputs; return their names.

    lender: layer that owns the cache. prefix: "window_" for a cache of limited length, else "".
    updated: names for the outputs. borrowed: True if `layer` only reads the cache.
    """
    graph, own, cache = layer.graph, layer.shape, layer.kv.cache
    shape: list[int | str] = [
        graph.sequences,
        own.n_kv_heads,
        f"{prefix}capacity",
        cache.width(own),
    ]
    names = [f"{name}{lender}" for name in (io.KEYS, io.VALUES)]
    inputs = [graph.input(name, cache.dtype, shape) for name in names]
    # With a quantized cache, kernels demand outputs even from layers that add no keys and values.
    updated = [] if borrowed and layer.kv.type not in QUANTIZED else updated
    return inputs, [graph.output(name, cache.dtype, shape) for name in updated]


def projected(layer: LayerGraph, x: str, *, apart: bool = False) -> list[str]:
    """Emit the projections of x, with any norms of heads; return the names of q, k and v.

    q, k and v are separate if heads are normed, v has another weight type, or `apart` is True. Else
    one value holds all three: [qkv, "", ""]. If the layer borrows K and V, k and v are empty.
    GroupQueryAttention could norm heads itself, but only some providers implement this.
    """
    graph, config, at, own = layer.graph, layer.config, layer.at, layer.shape
    if own.kv_layer != layer.number:
        from stem_edge.graph.parts.heads import borrowing  # only for such layers

        return borrowing(layer, layer.product("qkv", "qkv", x, QKV[:1]))
    values_apart = layer.products.values_apart(layer.number)
    packed = layer.product("qkv", "qkv", x, QKV[:2] if values_apart else QKV)
    if config.qk_norm_eps is None and not values_apart and not apart:
        return [packed, "", ""]
    heads = (config.n_heads, own.n_kv_heads, own.n_kv_heads)
    names = [at + name for name in ("qk" if values_apart else "qkv")]
    sizes = graph.sizes([n * io.head_width(own) for n in heads[: len(names)]])
    graph.node("Split", [packed, sizes], names, axis=-1)
    if values_apart:
        names.append(layer.product("v", "v", x, QKV[2:]))
    if config.qk_norm_eps is None:
        return names
    from stem_edge.graph.parts.heads import normed_heads  # only for such models

    return [normed_heads(layer, *one) for one in zip("qkv", names, heads, strict=True)]
