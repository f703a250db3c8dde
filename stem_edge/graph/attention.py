"""Attention of one layer as graph nodes: GroupQueryAttention, with the KV cache updated in place.

stem_edge.numerics.reference has the mathematics.
"""

from __future__ import annotations

import numpy as np

from stem_edge.graph import names as io
from stem_edge.graph.ir import CONTRIB
from stem_edge.graph.layer import LayerGraph

QKV = ("wq", "wk", "wv")


def attention(layer: LayerGraph, x: str) -> str:
    """Emit attention over x [1, T, dim], already normed -> [1, T, dim]."""
    graph, config, at = layer.graph, layer.config, layer.at
    width = io.head_width(config)
    shape: list[int | str] = [1, config.n_kv_heads, "capacity", width]
    caches = [name + str(layer.number) for name in (io.KEYS, io.VALUES)]
    for cache in caches:
        graph.input(cache, np.float32, shape)
        graph.output(io.NEW + cache, np.float32, shape)
    projected = [layer.product("qkv", "qkv", x, QKV), "", ""]
    if config.qk_norm_eps is not None:
        projected = _normed_heads(layer, projected[0])
    window = config.window(layer.number)
    mixed = graph.node(
        "GroupQueryAttention",
        [*projected, *caches, io.SEQLENS_K, io.TOTAL_LENGTH, io.ROPE_COS, io.ROPE_SIN],
        [at + "attended", *(io.NEW + cache for cache in caches)],
        CONTRIB,
        num_heads=config.n_heads,
        kv_num_heads=config.n_kv_heads,
        do_rotary=1,
        rotary_interleaved=int(config.rope_interleaved),
        # Its default would be that of the padded width, which must not change the scores.
        scale=config.head_dim**-0.5,
        **({"local_window_size": window} if window else {}),
    )
    return layer.product("wo", "wo", mixed, ("wo",))


def _normed_heads(layer: LayerGraph, packed: str) -> list[str]:
    """Split one product into q, k and v, and norm each head of q and k.

    GroupQueryAttention could norm them itself, but only some providers implement that.
    """
    graph, config, at = layer.graph, layer.config, layer.at
    width = io.head_width(config)
    heads = (config.n_heads, config.n_kv_heads, config.n_kv_heads)
    sizes = graph.sizes([n * width for n in heads])
    names = [at + name for name in ("q", "k", "v")]
    graph.node("Split", [packed, sizes], names, axis=-1)
    for n, (name, count) in enumerate(zip(names[:2], heads, strict=False)):
        cut = graph.reshape(name, [0, 0, count, width], name + ".cut")
        # Zeros as padding lower the mean of squares by this factor, so eps must shrink alike; the
        # exporter scales the weight to make up for the rest.
        eps = (config.qk_norm_eps or 0.0) * config.head_dim / width
        normed = layer.rms_norm(name + "_norm", cut, f"{'qk'[n]}_norm", eps)
        names[n] = graph.reshape(normed, [0, 0, count * width], name + ".normed")
    return names
