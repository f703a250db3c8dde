"""Attention over an int8 KV cache in the graph for prompts: a layer's codes become float32 first.

GroupQueryAttention takes 3 times as long over int8 keys and values as over float32 ones, if a step
has many tokens. Scales are applied to q and to the result, not to each key and value. Codes are the
same as those of the decoding graphs, and results differ by the order of sums only.
"""

from __future__ import annotations

import numpy as np

from stem_edge.graph import names as io
from stem_edge.graph.attention import caches, grouped, projected
from stem_edge.graph.ir import CONTRIB, ElementType
from stem_edge.graph.kv import KEYS, VALUES
from stem_edge.graph.layer import LayerGraph
from stem_edge.graph.parts.heads import no_tokens


def widened_attention(layer: LayerGraph, x: str) -> str:
    """Emit attention over the cached codes as float32: normed x [1, T, dim] -> [1, T, dim]."""
    graph, config, own, at = layer.graph, layer.config, layer.shape, layer.at
    prefix = io.WINDOW if layer.positions and own.window else ""
    updated = [f"{io.NEW}{name}{layer.number}" for name in (io.KEYS, io.VALUES)]
    cached, updated = caches(layer, prefix, layer.number, updated, borrowed=False)
    start, end = _rows(layer, prefix, x)
    q, k, v = projected(layer, x, apart=True)
    turn = [layer.positions if prefix else start, *io.rope_names(config, own)]
    turning = {"interleaved": int(config.rope_interleaved)}
    q, k = (
        graph.node(
            "RotaryEmbedding",
            [one, *turn],
            [f"{at}{n}.turned"],
            CONTRIB,
            num_heads=heads,
            **turning,
        )
        for n, one, heads in (("q", q, config.n_heads), ("k", k, own.n_kv_heads))
    )
    wide = list[str]()
    for what, value, cache, new in zip((KEYS, VALUES), (k, v), cached, updated, strict=True):
        codes = _codes(layer, what, value)
        graph.add("TensorScatter", [cache, codes, start], new, axis=2)
        filled = graph.add("Slice", [new, graph.sizes([0]), end, graph.sizes([2])], new + ".filled")
        wide.append(graph.add("Cast", [filled], new + ".wide", to=int(ElementType.FLOAT)))
    q = graph.add("Mul", [q, _scales(layer, KEYS, config.n_heads)], at + "q.scaled")
    nothing = no_tokens(layer, q)
    lengths = [prefix + name for name in (io.SEQLENS_K, io.TOTAL_LENGTH)]
    codes = grouped(layer, [q, nothing, nothing, *wide, *lengths], [], own.window, do_rotary=0)
    mixed = graph.add("Mul", [codes, _scales(layer, VALUES, config.n_heads)], at + "mixed")
    return layer.product("wo", "wo", mixed, ("wo",))


def _rows(layer: LayerGraph, prefix: str, x: str) -> tuple[str, str]:
    """Emit the places in the KV cache of the first token of x [1, T, dim], and after the last.

    Both are [1]. prefix: "window_" for a cache of limited length, else "".
    """
    graph, start, end = layer.graph, prefix + "start", prefix + "end"
    if not any(start in node.outputs for node in graph.nodes):
        total = graph.add(
            "Cast", [prefix + io.TOTAL_LENGTH], end + ".wide", to=int(ElementType.INT64)
        )
        graph.reshape(total, [1], end)
        tokens = graph.add("Shape", [x], start + ".tokens", start=1, end=2)
        graph.add("Sub", [end, tokens], start)
    return start, end


def _codes(layer: LayerGraph, what: str, x: str) -> str:
    """Emit keys or values (`what`) x [1, T, heads * width] as int8 codes [1, heads, T, width]."""
    graph, at, heads = layer.graph, layer.at + what, layer.shape.n_kv_heads
    # A division and one scale of 1, because onnxruntime's loop over a scale for each channel is slow.
    steps = graph.add("Div", [x, _scales(layer, what, heads)], at + ".steps")
    zero = graph.constant("zero.int8", np.array(0, np.int8))
    codes = graph.add("QuantizeLinear", [steps, graph.float(1.0), zero], at + ".codes")
    apart = graph.reshape(codes, [0, 0, heads, io.head_width(layer.shape)], at + ".heads")
    return graph.add("Transpose", [apart], at + ".new", perm=(0, 2, 1, 3))


def _scales(layer: LayerGraph, what: str, heads: int) -> str:
    """Emit scales of keys or values (`what`), repeated for `heads` heads: [heads * width]."""
    graph, own, at = layer.graph, layer.shape, f"{layer.at}{what}.scales.{heads}"
    if any(at in node.outputs for node in graph.nodes):
        return at
    scales, width = layer.kv.scales(graph, layer.number, what), io.head_width(own)
    apart = graph.reshape(scales, [own.n_kv_heads, 1, width], at + ".apart")
    sizes = graph.sizes([own.n_kv_heads, heads // own.n_kv_heads, width])
    return graph.reshape(graph.add("Expand", [apart, sizes], at + ".all"), [-1], at)
