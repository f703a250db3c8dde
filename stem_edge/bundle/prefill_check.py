"""Which prompts the graph for prompts takes, and how far it is from the graphs that decode.

An export leaves the graph out if it is less exact than those that decode.
"""

from __future__ import annotations

from stem_edge.bundle.footprint import Footprint
from stem_edge.numerics.quantize import F32
from stem_edge.units import format_size

PROBE_TOKENS = 48
# From so many tokens on, the prefill graph is the faster one: from 13 with SmolLM2-135M; from 8 with 1B
# (docs/measuring.md). It is chosen by the whole prompt and not by the chunk, so that the chunk size changes no token.
PREFILL_FROM = 8


def mean_divergence(decode: F32, prefill: F32) -> float:
    """Mean divergence of the prefill graph's logits [T, V] from the decoding graph's, in nats.

    Limited to the first PROBE_TOKENS, because some bundles have a longer probe.
    """
    from stem_edge.numerics.distributions import divergence  # for exports

    return float(divergence(decode[:PROBE_TOKENS], prefill[:PROBE_TOKENS]).mean())


def crowding(footprint: Footprint, memory: int) -> str:
    """Return why the matrices of both graphs do not fit into `memory` bytes; empty if they do.

    Where they cannot, those for decoding would be read again after each prompt.
    """
    both = footprint.step_nbytes + footprint.prefill_nbytes
    if not footprint.prefill_nbytes or both <= memory:
        return ""
    sizes = f"{format_size(both)} with those that decode, in {format_size(memory)} of memory"
    return f"its matrices would take {sizes}"
