"""How fast a machine decodes, without a model: the rates that a prediction multiplies with.

A decode step reads every weight and the whole KV cache once, so its time is bytes over rates, plus
what small operators take in each layer. Here, the rates are timed on single operators of the engine
(rates_ort, rates_ggml) in the time of a breath; of a device that is not at hand they are derived
from its memory bandwidth.
"""

from __future__ import annotations

from stem_edge.bundle.footprint import Footprint
from stem_edge.graph.formats import GgufFormat
from stem_edge.measuring.planning.timing import Rates

# Of the memory bandwidth, what the kernels reached where both were measured (docs/results.md); and the time
# of a layer's small operators on a core of a phone's class.
WEIGHTS_SHARE, KV_SHARE, SLOW_LAYER_SECONDS = 0.8, 0.3, 150e-6


def measure_rates(footprint: Footprint, threads: int, *, repack: bool = False) -> Rates:
    """Time the kernels of the footprint's engine, which must be installed, on this machine.

    Takes a second or two, and 200 MB for that time. Raises BackendError.
    """
    backbone = footprint.backbone
    if isinstance(backbone, GgufFormat):
        from stem_edge.measuring.planning.rates_ggml import ggml_rates

        return ggml_rates(footprint.model, backbone, threads, repack=repack)
    from stem_edge.measuring.planning.rates_ort import ort_rates

    return ort_rates(backbone, threads)


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
    """Derive those of a device from its memory bandwidth, in bytes a second."""
    weights = WEIGHTS_SHARE * bandwidth
    source = f"from {bandwidth / 1e9:g} GB/s of memory bandwidth, {whose}"
    return Rates(weights, weights, KV_SHARE * bandwidth, SLOW_LAYER_SECONDS, source)
