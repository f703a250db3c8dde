"""Rates of a decode step that follow from the bandwidth of memory."""

from __future__ import annotations

from dataclasses import dataclass

from stem_edge.bundle.footprint import Footprint
from stem_edge.graph.kv import KvType

# Shares of the memory bandwidth that kernels reached where both were measured (docs/results.md),
# and the time of a layer's small operators on a core like a phone's.
WEIGHTS_SHARE, KV_SHARE, SLOW_LAYER_SECONDS = 0.8, 0.3, 150e-6
# Time of a byte of keys and values on onnxruntime's CPU over that of fp32: its kernels for smaller
# types are bound by computing (a layer with 8 heads of 64 for keys and values, 8,192 tokens).
ORT_KV_TIMES: dict[KvType, float] = {"fp32": 1.0, "fp16": 10.0, "int8": 4.0, "int4": 8.0}


@dataclass(frozen=True)
class Rates:
    """Bytes a second that a decode step reads, and the time of what does not depend on bytes."""

    weights: float
    kv: float
    layer_seconds: float  # small operators of one layer, for one token


def derived_rates(bandwidth: float, footprint: Footprint) -> Rates:
    """Derive the rates of a device from its memory bandwidth, in bytes a second."""
    kv = KV_SHARE * bandwidth
    if footprint.engine == "onnxruntime":
        kv /= ORT_KV_TIMES[footprint.kv]
    return Rates(WEIGHTS_SHARE * bandwidth, kv, SLOW_LAYER_SECONDS)
