"""Rates of onnxruntime, timed on graphs of one operator, larger than any cache, and a tiny model.

Weights are constants that onnxruntime makes while it loads a graph.
"""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from stem_edge.bundle.footprint import matrix_nbytes
from stem_edge.graph.attention import quantized
from stem_edge.graph.encoder import encode
from stem_edge.graph.formats import WEIGHT_BITS, BackboneFormat, WeightType
from stem_edge.graph.ir import CONTRIB, Array, Graph
from stem_edge.graph.kv import CACHES, QUANTIZED, KvType
from stem_edge.measuring.planning.timing import DEMO, MATRIX_SHAPE, Rates, steps_seconds, timed
from stem_edge.numerics.quantize import fitting_block
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU
from stem_edge.runtime.backends.onnxruntime.providers.session import new_session
from stem_edge.runtime.loading import load

PAIRS = {4: 8, 8: 4, 32: 1}  # bits -> pairs of matrices in a probe: 128 MiB of codes
ATTENTION_SHAPE = (16, 32, 8, 64, 2048)  # layers, heads, those of keys and values, width, tokens
DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(int32)": np.int32,
}
# Share of the rate of a probe's large matrices that a model reaches, because it has smaller ones, too.
MODEL_SHARE = 0.9


def ort_rates(backbone: BackboneFormat, kv: KvType, threads: int) -> Rates:
    """Time matrices, attention, and the rest of a layer."""
    weights = _matmul_rate(backbone.weights, backbone.block_size, threads)
    stored = backbone.type_of("head")
    same = stored == backbone.weights
    head = weights if same else _matmul_rate(stored, backbone.block_size, threads)
    return Rates(
        weights,
        head,
        _attention_rate(kv, threads),
        _layer_seconds(threads),
        f"measured on this machine, {threads} threads",
    )


def _matmul_rate(kind: WeightType, block_size: int, threads: int) -> float:
    bits, block = WEIGHT_BITS[kind], fitting_block(MATRIX_SHAPE[0], block_size)
    session = new_session(encode(products(bits, block)), threads, [CPU])
    x = np.ones((1, 1, MATRIX_SHAPE[0]), np.float32)
    nbytes = 2 * PAIRS[bits] * matrix_nbytes(*MATRIX_SHAPE, kind, block)
    return MODEL_SHARE * nbytes / timed(lambda: session.run(None, {"x": x}))


def _attention_rate(kv: KvType, threads: int) -> float:
    layers, _, kv_heads, width, tokens = ATTENTION_SHAPE
    session = new_session(encode(attention(kv)), threads, [CPU])
    binding, kept = session.io_binding(), []
    for value in session.get_inputs():
        array = np.zeros(value.shape, DTYPES[value.type])
        if value.name in ("seqlens_k", "total"):
            array[...] = tokens - (value.name == "seqlens_k")
        kept.append(ort.OrtValue.ortvalue_from_numpy(array))
        binding.bind_ortvalue_input(value.name, kept[-1])
        if value.name.startswith(("keys", "values")):  # in place, as the engine must bind them
            binding.bind_ortvalue_output("new_" + value.name, kept[-1])
    for layer in range(layers):
        binding.bind_output(f"mixed{layer}")
    seconds = timed(lambda: session.run_with_iobinding(binding))
    return layers * 2 * kv_heads * width * tokens * CACHES[kv].bits / 8 / seconds


def _layer_seconds(threads: int) -> float:
    """Time the model inside this package, in which matrices hardly take time."""
    with load(DEMO, threads=threads, engine="onnxruntime", warm_start=False) as model:
        return steps_seconds(model.engine) / model.config.n_layers


def products(bits: int, block: int) -> Graph:
    """Return a graph that takes x [1, 1, K] through pairs of matrices [N, K] and [K, N]."""
    graph, shape = Graph(), [1, 1, MATRIX_SHAPE[0]]
    x = graph.input("x", np.float32, shape)
    for pair in range(PAIRS[bits]):
        # Pairs differ, because equal constants would be merged into one, which stays in the cache.
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


def attention(kv: KvType = "fp32") -> Graph:
    """Return a graph of several layers in which one new token attends to all others."""
    layers, heads, kv_heads, width, tokens = ATTENTION_SHAPE
    graph, cache = Graph(), CACHES[kv]
    shape, scales = [1, kv_heads, tokens, width // cache.per_byte], list[str]()
    if kv in QUANTIZED:
        scales = [_filled(graph, "scales", np.array([0.1], np.float32), [1, kv_heads, 1, width])]
    mixed = graph.input("qkv", np.float32, [1, 1, (heads + 2 * kv_heads) * width])
    tables = [graph.input(name, np.float32, [tokens, width // 2]) for name in ("cos", "sin")]
    sizes = [graph.input("seqlens_k", np.int32, [1]), graph.input("total", np.int32, [])]
    for layer in range(layers):
        caches = [graph.input(f"{n}{layer}", cache.dtype, shape) for n in ("keys", "values")]
        outputs = [f"mixed{layer}", *(f"new_{cache}" for cache in caches)]
        graph.output(outputs[0], np.float32, [1, 1, heads * width])
        for output in outputs[1:]:
            graph.output(output, cache.dtype, shape)
        graph.node(
            "GroupQueryAttention",
            [mixed, "", "", *caches, *sizes, *tables, *(["", "", "", *2 * scales] * bool(scales))],
            outputs,
            CONTRIB,
            num_heads=heads,
            kv_num_heads=kv_heads,
            do_rotary=1,
            **(quantized(cache.bits) if scales else {}),
        )
    return graph


def _filled(graph: Graph, name: str, value: Array, shape: list[int]) -> str:
    """Add a tensor of one value, which onnxruntime folds into a constant; return its name."""
    return graph.fill(graph.sizes(shape), name, value)
