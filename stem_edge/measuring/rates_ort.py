"""The rates of onnxruntime: graphs of single operators (stem_edge.measuring.probes), and a tiny model."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from stem_edge.footprint import matrix_nbytes
from stem_edge.formats import WEIGHT_BITS, BackboneFormat, WeightType
from stem_edge.graph.encoder import encode
from stem_edge.measuring.probes import ATTENTION_SHAPE, PAIRS, attention, products
from stem_edge.measuring.rates import DEMO, MATRIX_SHAPE, Rates, steps_seconds, timed
from stem_edge.quantize import fitting_block
from stem_edge.runtime.loading import load
from stem_edge.runtime.ort_session import new_session
from stem_edge.runtime.providers import CPU

# Of the rate of a probe's large matrices, what a model reaches with its smaller ones between them.
MODEL_SHARE = 0.9


def ort_rates(backbone: BackboneFormat, threads: int) -> Rates:
    """See measure_rates."""
    weights = _matmul_rate(backbone.weights, backbone.block_size, threads)
    same = backbone.head == backbone.weights
    head = weights if same else _matmul_rate(backbone.head, backbone.block_size, threads)
    return Rates(
        weights,
        head,
        _attention_rate(threads),
        _layer_seconds(threads),
        f"measured on this machine, {threads} threads",
    )


def _matmul_rate(kind: WeightType, block_size: int, threads: int) -> float:
    block = fitting_block(MATRIX_SHAPE[0], block_size)
    session = new_session(encode(products(WEIGHT_BITS[kind], block)), threads, [CPU])
    x = np.ones((1, 1, MATRIX_SHAPE[0]), np.float32)
    seconds = timed(lambda: session.run(None, {"x": x}))
    return (
        MODEL_SHARE
        * 2
        * PAIRS[WEIGHT_BITS[kind]]
        * matrix_nbytes(*MATRIX_SHAPE, kind, block)
        / seconds
    )


def _attention_rate(threads: int) -> float:
    layers, _, kv_heads, width, tokens = ATTENTION_SHAPE
    session = new_session(encode(attention()), threads, [CPU])
    binding, kept = session.io_binding(), []
    for value in session.get_inputs():
        dtype = np.float32 if "float" in value.type else np.int32
        array = np.zeros(value.shape, dtype)
        if value.name in ("seqlens_k", "total"):
            array[...] = tokens - (value.name == "seqlens_k")
        kept.append(ort.OrtValue.ortvalue_from_numpy(array))
        binding.bind_ortvalue_input(value.name, kept[-1])
        if value.name.startswith(("keys", "values")):  # as in the engine: the same memory
            binding.bind_ortvalue_output("new_" + value.name, kept[-1])
    for layer in range(layers):
        binding.bind_output(f"mixed{layer}")
    seconds = timed(lambda: session.run_with_iobinding(binding))
    return layers * 2 * kv_heads * width * tokens * 4 / seconds


def _layer_seconds(threads: int) -> float:
    """Of the model inside this package, whose layers hardly compute anything."""
    with load(DEMO, threads=threads, engine="onnxruntime", warm_start=False) as model:
        return steps_seconds(model.engine) / model.config.n_layers
