"""Is the prefill graph as exact here as where the bundle was made?

It has other kernels than the graphs that decode, and each kind of processor has its own of both. On
x86 without VNNI those of the prefill graph once were wrong without an error. So the report of a
bundle says how far the two diverged over its probe tokens, and a first load measures that here.
"""

from __future__ import annotations

from stem_edge.bundle.manifest import Manifest
from stem_edge.numerics.distributions import divergence
from stem_edge.numerics.quantize import F32

PROBE_TOKENS = 48
# From so many tokens on, the prefill graph is the faster one wherever that was measured. It is
# chosen by the whole prompt and not by the chunk, so that the size of chunks changes no token.
PREFILL_FROM = 8
# Right kernels of other processors differ by rounding: divergences were 0.98 to 1.01 times those of
# the report, wrong ones 1.3 to 75 times. NEGLIGIBLE: nats that are too few to change a text.
MOST_TIMES, NEGLIGIBLE = 1.25, 0.001
UNUSABLE = 1e9  # nats, of a graph whose logits are not even numbers; JSON knows no infinity


def probe_tokens(manifest: Manifest) -> list[int]:
    """The ids over which both graphs are compared; none where there is no report on that."""
    report = manifest.reports.get("onnxruntime")
    if not manifest.has_prefill or report is None or report.prefill_from_decode is None:
        return []
    model = manifest.model
    count = min(PROBE_TOKENS, model.max_context)
    ids = report.probe_tokens[:count]
    return [*ids] if len(ids) >= PREFILL_FROM and max(ids) < model.vocab_size else []


def mean_divergence(decode: F32, prefill: F32) -> float:
    """Mean divergence of the prefill graph's logits [T, V] from the others', in nats.

    Of the first PROBE_TOKENS: bundles were made whose probe is longer.
    """
    return float(divergence(decode[:PROBE_TOKENS], prefill[:PROBE_TOKENS]).mean())


def prefill_refusal(manifest: Manifest, found: float | None) -> str:
    """Why the prefill graph is not used here, where they diverge so far; empty if it is.

    found: what mean_divergence gave here; None, if that was not measured.
    """
    report = manifest.reports.get("onnxruntime")
    if report is None or report.prefill_from_decode is None or found is None:
        return ""
    promised = report.prefill_from_decode
    if found <= MOST_TIMES * promised + NEGLIGIBLE:
        return ""
    return (
        f"it is {found:.3g} nats from the graphs that decode, on this processor, and was {promised:.3g} "
        "where it was exported"
    )
