"""Prefill check: is the prefill graph as exact on this processor as where the bundle was made?

The prefill graph uses other kernels than the decoding graph, and each kind of processor has its
own of both. On x86 without VNNI, kernels of the prefill graph were wrong without an error. So the
report of a bundle says how far the two graphs diverged over its probe tokens, and that is measured
again on each kind of processor.
"""

from __future__ import annotations

from stem_edge.bundle.footprint import Footprint
from stem_edge.bundle.manifest import Manifest
from stem_edge.graph.decode import PREFILL_DATA
from stem_edge.graph.formats import BACKBONE_DATA
from stem_edge.numerics.quantize import F32
from stem_edge.units import format_size

PROBE_TOKENS = 48
# From so many tokens on, the prefill graph is the faster one: from 13 with SmolLM2-135M; from 8 with 1B
# (docs/measuring.md). It is chosen by the whole prompt and not by the chunk, so that the chunk size changes no token.
PREFILL_FROM = 8
# Correct kernels of other processors differ by rounding: their divergence was 0.98 to 1.01 times
# the reported one, with wrong kernels 1.3 to 75 times. NEGLIGIBLE nats change no text.
MOST_TIMES, NEGLIGIBLE = 1.25, 0.001
# More than these bytes of matrices are compared when they are prepared, not while they are loaded.
TRIED_NBYTES = 64 << 20


def probe_tokens(manifest: Manifest) -> list[int]:
    """Ids over which both graphs are compared; empty if the bundle has no report on that."""
    report = manifest.reports.get("onnxruntime")
    if not manifest.has_prefill or report is None or report.prefill_from_decode is None:
        return []
    model = manifest.model
    count = min(PROBE_TOKENS, model.max_context)
    ids = report.probe_tokens[:count]
    return [*ids] if len(ids) >= PREFILL_FROM and max(ids) < model.vocab_size else []


def mean_divergence(decode: F32, prefill: F32) -> float:
    """Mean divergence of the prefill graph's logits [T, V] from the decoding graph's, in nats.

    Limited to the first PROBE_TOKENS, because some bundles have a longer probe.
    """
    from stem_edge.numerics.distributions import divergence  # for first loads and exports

    return float(divergence(decode[:PROBE_TOKENS], prefill[:PROBE_TOKENS]).mean())


def tried(manifest: Manifest) -> bool:
    """Return whether a load compares both graphs, unless there is nothing to compare."""
    return matrices_nbytes(manifest) <= TRIED_NBYTES or not probe_tokens(manifest)


def matrices_nbytes(manifest: Manifest) -> int:
    """Return the bytes of the weight files of all graphs."""
    return sum(manifest.files[name].nbytes for name in weight_files(manifest))


def weight_files(manifest: Manifest) -> list[str]:
    """Return the names of the weight files of all graphs."""
    return [name for name in (BACKBONE_DATA, PREFILL_DATA) if name in manifest.files]


def prefill_refusal(manifest: Manifest, found: float | None) -> str:
    """Reason why the prefill graph must not be used here; empty if it may.

    found: mean_divergence on this processor; None if not measured.
    """
    report = manifest.reports.get("onnxruntime")
    if report is None or report.prefill_from_decode is None or found is None:
        return ""
    promised = report.prefill_from_decode
    if found <= MOST_TIMES * promised + NEGLIGIBLE:
        return ""
    return (
        f"it diverges {found:.3g} nats from the decoding graph on this processor, and "
        f"{promised:.3g} where it was exported"
    )


def crowding(footprint: Footprint, memory: int) -> str:
    """Return why the matrices of both graphs do not fit into `memory` bytes; empty if they do.

    Where they cannot, those for decoding would be read again after each prompt.
    """
    both = footprint.step_nbytes + footprint.prefill_nbytes
    if not footprint.prefill_nbytes or both <= memory:
        return ""
    sizes = f"{format_size(both)} with those that decode, in {format_size(memory)} of memory"
    return f"its matrices would take {sizes}"
