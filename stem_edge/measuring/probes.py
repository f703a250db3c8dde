"""Graphs of the operators that a decode step spends its time in, at sizes beyond any cache.

Weights are constants that onnxruntime makes while it loads the graph.
"""

from __future__ import annotations

import numpy as np

from stem_edge.graph.ir import CONTRIB, Array, Graph
from stem_edge.measuring.rates import MATRIX_SHAPE

PAIRS = {4: 8, 8: 4, 32: 1}  # bits -> pairs of matrices in a probe: 128 MiB of codes
ATTENTION_SHAPE = (16, 32, 8, 64, 2048)  # layers, heads, of keys and values, width, tokens


def products(bits: int, block: int) -> Graph:
    """x [1, 1, K] through pairs of matrices [N, K] and [K, N]."""
    graph, shape = Graph(), [1, 1, MATRIX_SHAPE[0]]
    x = graph.input("x", np.float32, shape)
    for pair in range(PAIRS[bits]):
        # Equal constants would become one, and stay in the cache.
        scale, code = np.array([1e-3 * (1 + pair)], np.float32), np.array([0x77 + pair], np.uint8)
        for width, rows in (MATRIX_SHAPE, MATRIX_SHAPE[::-1]):
            at = f"{pair}.{width}"
            if bits == 32:
                weight = _filled(graph, at + ".weight", scale, [rows, width])
                x = graph.node("FusedMatMul", [x, weight], [at], CONTRIB, transB=1)
                continue
            codes = [rows, width // block, block * bits // 8]
            names = [
                _filled(graph, at + ".codes", code, codes),
                _filled(graph, at + ".scales", scale, [rows * width // block]),
            ]
            x = graph.node(
                "MatMulNBits",
                [x, *names],
                [at],
                CONTRIB,
                K=width,
                N=rows,
                bits=bits,
                block_size=block,
                accuracy_level=4,
            )
    graph.output(x, np.float32, shape)
    return graph


def attention() -> Graph:
    """One new token attending to all others, in several layers after another."""
    layers, heads, kv_heads, width, tokens = ATTENTION_SHAPE
    graph, kv = Graph(), [1, kv_heads, tokens, width]
    mixed = graph.input("qkv", np.float32, [1, 1, (heads + 2 * kv_heads) * width])
    tables = [graph.input(name, np.float32, [tokens, width // 2]) for name in ("cos", "sin")]
    sizes = [graph.input("seqlens_k", np.int32, [1]), graph.input("total", np.int32, [])]
    for layer in range(layers):
        caches = [graph.input(f"{n}{layer}", np.float32, kv) for n in ("keys", "values")]
        outputs = [f"mixed{layer}", *(f"new_{cache}" for cache in caches)]
        graph.output(outputs[0], np.float32, [1, 1, heads * width])
        for output in outputs[1:]:
            graph.output(output, np.float32, kv)
        graph.node(
            "GroupQueryAttention",
            [mixed, "", "", *caches, *sizes, *tables],
            outputs,
            CONTRIB,
            num_heads=heads,
            kv_num_heads=kv_heads,
            do_rotary=1,
        )
    return graph


def _filled(graph: Graph, name: str, value: Array, shape: list[int]) -> str:
    """A tensor of one value, which onnxruntime takes for a constant."""
    return graph.fill(graph.sizes(shape), name, value)
