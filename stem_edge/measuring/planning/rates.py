"""Rates of a machine, measured without the model, from which the speed of decoding is predicted.

A decode step reads every weight and the whole KV cache once, so its time is bytes over rates, plus
the time of small operators in each layer. The rates are timed on single operators of the engine
(rates_ort, rates_ggml); those of a device that is not at hand are derived from its memory bandwidth.
"""

from __future__ import annotations

from statistics import harmonic_mean

from stem_edge.bundle.footprint import Footprint
from stem_edge.graph.formats import GgufFormat
from stem_edge.graph.kv import KvType
from stem_edge.measuring.planning.timing import Rates

# Shares of the memory bandwidth that the kernels reached where both were measured (docs/results.md),
# and the time of a layer's small operators on a core like a phone's.
WEIGHTS_SHARE, KV_SHARE, SLOW_LAYER_SECONDS = 0.8, 0.3, 150e-6
# Time of a byte of keys and values on onnxruntime's CPU over that of fp32: its kernels for smaller
# types are bound by computing (a layer with 8 heads of 64 for keys and values, 8,192 tokens).
ORT_KV_TIMES: dict[KvType, float] = {"fp32": 1.0, "fp16": 10.0, "int8": 4.0, "int4": 8.0}


def measure_rates(footprint: Footprint, threads: int, *, repack: bool = False) -> Rates:
    """Time the kernels of the footprint's engine, which must be installed, on this machine.

    Takes a second or two, and 200 MB of memory meanwhile. Raises BackendError.
    """
    backbone = footprint.backbone
    if isinstance(backbone, GgufFormat):
        from stem_edge.measuring.planning.rates_ggml import ggml_rates

        return ggml_rates(footprint.model, backbone, footprint.kv, threads, repack=repack)
    from stem_edge.measuring.planning.rates_ort import ort_rates

    return ort_rates(backbone, footprint.kv, threads)


def between(before: Rates, after: Rates) -> Rates:
    """Return the mean of two measurements; of rates, the harmonic mean, which is that of times."""
    return Rates(
        harmonic_mean((before.weights, after.weights)),
        harmonic_mean((before.head, after.head)),
        harmonic_mean((before.kv, after.kv)),
        (before.layer_seconds + after.layer_seconds) / 2,
        before.source,
    )


def derived_rates(bandwidth: float, whose: str, footprint: Footprint) -> Rates:
    """Derive the rates of a device from its memory bandwidth, in bytes a second."""
    weights, kv = WEIGHTS_SHARE * bandwidth, KV_SHARE * bandwidth
    if footprint.engine == "onnxruntime":
        kv /= ORT_KV_TIMES[footprint.kv]
    source = f"from {bandwidth / 1e9:g} GB/s of memory bandwidth, {whose}"
    return Rates(weights, weights, kv, SLOW_LAYER_SECONDS, source)
