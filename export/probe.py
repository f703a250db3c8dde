"""Does the new bundle compute what the checkpoint computes? Asked of the bundle as a user loads it,
through the package's front door, with the numpy reference model on the checkpoint as the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

import stem_edge
from stem_edge.errors import ExportError
from stem_edge.quantize import F32

# Reruns on other processors differ in the last digits of a sum; the report does not.
DIGITS = 3


@dataclass(frozen=True)
class Comparison:
    """A bundle's logits against its checkpoint's."""

    worst_difference: float
    divergence: float  # mean Kullback-Leibler divergence from the checkpoint's distributions, nats


def compare_logits(
    folder: Path, token_ids: list[int], expected: F32, threads: int, *, prefill_graph: bool
) -> Comparison:
    """Compare over all positions. Raises ExportError when the bundle computes no numbers."""
    with stem_edge.load(
        folder,
        threads=threads,
        context_length=len(token_ids),
        prefill_graph=prefill_graph,
        prepare=False,
        warm_start=False,
    ) as model:
        found = model.logits(token_ids)
    if not np.isfinite(found).all():
        raise ExportError(
            f"{folder}: the exported model computes NaN or infinite logits; "
            "export with --backbone fp32 --tables fp32 to see whether quantization is the cause"
        )
    return Comparison(
        worst_difference=rounded(float(np.abs(found - expected).max())),
        divergence=rounded(float(divergence(expected, found).mean())),
    )


def divergence(expected: F32, found: F32) -> F32:
    """KL(expected || found) in nats, at each position of logits [T, V]."""
    p, q = _log_softmax(expected), _log_softmax(found)
    return np.asarray(np.maximum((np.exp(p) * (p - q)).sum(axis=-1), 0), np.float32)


def _log_softmax(logits: F32) -> F32:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)), np.float32)


def rounded(value: float) -> float:
    """To as many digits as a report shows."""
    return float(f"{value:.{DIGITS}g}")
