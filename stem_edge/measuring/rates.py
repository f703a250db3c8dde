"""How fast a machine decodes, without a model: the rates that a prediction multiplies with.

A decode step reads every weight and the whole KV cache once, so its time is bytes over rates, plus
what small operators take in each layer. Here, the rates are timed on graphs of single operators
(tools/make_probes.py) in the time of a breath; of a device that is not at hand they are derived from
its memory bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import onnxruntime as ort

from stem_edge.bundle import WEIGHT_BITS, BackboneFormat, WeightType
from stem_edge.footprint import matrix_nbytes
from stem_edge.runtime.loading import load
from stem_edge.runtime.ort_session import CPU, open_session

PROBES = Path(__file__).with_name("probes")
ATTENTION = "attention.onnx"
MATRIX_SHAPE = (2048, 8192)
PAIRS = {4: 8, 8: 4, 32: 1}  # bits -> pairs of matrices in a probe: 128 MiB of codes
ATTENTION_SHAPE = (16, 32, 8, 64, 2048)  # layers, heads, of keys and values, width, tokens
PROBE_SECONDS = 0.4
LEAST_RUNS, MOST_RUNS = 5, 200
DISTINCT_TOKENS = 8  # so few that their rows are in memory, as most are in a real text
# Of the rate of a probe's large matrices, what a model reaches with its smaller ones between them.
MODEL_SHARE = 0.9
BLOCKS = (32, 64, 128)
# Of the memory bandwidth, what the kernels reached where both were measured (README); and the time
# of a layer's small operators on a core of a phone's class.
WEIGHTS_SHARE, KV_SHARE, SLOW_LAYER_SECONDS = 0.8, 0.3, 150e-6


@dataclass(frozen=True)
class Rates:
    """Bytes a second that a decode step reads, and the time of what is not reading."""

    weights: float  # matrices of the layers
    head: float
    kv: float
    layer_seconds: float  # small operators of one layer, at one token
    source: str  # where these come from, in words


def measure_rates(backbone: BackboneFormat, threads: int) -> Rates:
    """Of this machine and this onnxruntime. Takes a second or two, and 200 MB for that time."""
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


def between(before: Rates, after: Rates) -> Rates:
    """The mean in time of two measurements: others may have begun to use the machine, or ended."""
    return Rates(
        _mean_rate(before.weights, after.weights),
        _mean_rate(before.head, after.head),
        _mean_rate(before.kv, after.kv),
        (before.layer_seconds + after.layer_seconds) / 2,
        before.source,
    )


def _mean_rate(one: float, other: float) -> float:
    return 2 / (1 / one + 1 / other)


def derived_rates(bandwidth: float, whose: str) -> Rates:
    """Of a device of so many bytes a second of memory bandwidth."""
    weights = WEIGHTS_SHARE * bandwidth
    source = f"from {bandwidth / 1e9:g} GB/s of memory bandwidth, {whose}"
    return Rates(weights, weights, KV_SHARE * bandwidth, SLOW_LAYER_SECONDS, source)


def matmul_probe(bits: int, block: int) -> str:
    """File of a probe."""
    return f"matmul.{bits}.onnx" if bits == 32 else f"matmul.{bits}.{block}.onnx"


def _matmul_rate(kind: WeightType, block_size: int, threads: int) -> float:
    block = min(BLOCKS, key=lambda known: abs(np.log(known / block_size)))
    session = open_session(PROBES / matmul_probe(WEIGHT_BITS[kind], block), threads, [CPU])
    x = np.ones((1, 1, MATRIX_SHAPE[0]), np.float32)
    seconds = _timed(lambda: session.run(None, {"x": x}))
    return (
        MODEL_SHARE
        * 2
        * PAIRS[WEIGHT_BITS[kind]]
        * matrix_nbytes(*MATRIX_SHAPE, kind, block)
        / seconds
    )


def _attention_rate(threads: int) -> float:
    layers, _, kv_heads, width, tokens = ATTENTION_SHAPE
    session = open_session(PROBES / ATTENTION, threads, [CPU])
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
    seconds = _timed(lambda: session.run_with_iobinding(binding))
    return layers * 2 * kv_heads * width * tokens * 4 / seconds


def _layer_seconds(threads: int) -> float:
    """Of the model inside this package, whose layers hardly compute anything.

    With what belongs to a step: the prefetch of a row, the choice of a token.
    """
    with load(
        Path(__file__).parent.parent / "demo_model", threads=threads, warm_start=False
    ) as model:
        context = model.engine.open_context(MOST_RUNS + 2)

        def step() -> None:
            ids = np.array([context.position % DISTINCT_TOKENS])
            model.engine.expect(ids)
            int(model.engine.step(context, ids)[0].argmax())

        return _timed(step) / model.config.n_layers


def _timed(run: Callable[[], object]) -> float:
    """Median seconds of a run, after one that warms up."""
    run()
    times: list[float] = []
    while len(times) < LEAST_RUNS or (sum(times) < PROBE_SECONDS and len(times) < MOST_RUNS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return median(times)
