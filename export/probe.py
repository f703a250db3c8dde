"""Does the new bundle compute what the checkpoint computes? Asked of the bundle as a user loads it,
through the package's front door, with the numpy reference model on the checkpoint as the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

import stem_edge
from stem_edge.distributions import divergence
from stem_edge.errors import ExportError
from stem_edge.formats import EngineName
from stem_edge.quantize import F32

# Engine -> what to try when the result is not good enough: nothing is quantized; more bits.
EXACT = {"onnxruntime": "--backbone fp32 --tables fp32", "ggml": "--backbone f32 --tables fp32"}
BETTER = {
    "onnxruntime": "(--backbone int8, --tables int8), smaller blocks (--block-size 32)",
    "ggml": "(--backbone q6_k, --tables int8), a text that weights channels (--calibration FILE)",
}
# Reruns on other processors differ in the last digits of a sum; the report does not.
DIGITS = 3


@dataclass(frozen=True)
class Comparison:
    """A bundle's logits against its checkpoint's."""

    worst_difference: float
    divergence: float  # mean Kullback-Leibler divergence from the checkpoint's distributions, nats
    divergence_99: float  # its 99th percentile over the positions
    agreement: float  # share of positions where both think the same token the most probable


def compute_logits(
    folder: Path,
    token_ids: list[int],
    threads: int,
    *,
    engine: EngineName,
    prefill_graph: bool,
) -> F32:
    """Logits [T, V] of the bundle in a folder. Raises ExportError if they are no numbers."""
    with stem_edge.load(
        folder,
        threads=threads,
        engine=engine,
        context_length=len(token_ids),
        prefill_graph=prefill_graph if engine == "onnxruntime" else None,
        prepare=False,
        warm_start=False,
        trial=False,  # the exporter wrote it
    ) as model:
        found = model.logits(token_ids)
    if not np.isfinite(found).all():
        raise ExportError(
            f"{folder}: the exported model computes NaN or infinite logits; "
            f"export with {EXACT[engine]} to see whether quantization is the cause"
        )
    return found


def compare(expected: F32, found: F32) -> Comparison:
    """Compare logits [T, V] over all positions."""
    divergences = divergence(expected, found)
    return Comparison(
        worst_difference=rounded(float(np.abs(found - expected).max())),
        divergence=rounded(float(divergences.mean())),
        divergence_99=rounded(float(np.percentile(divergences, 99))),
        agreement=rounded(float((found.argmax(axis=1) == expected.argmax(axis=1)).mean())),
    )


def check_divergence(
    found: float, allowed: float | None, source: Path, positions: int, *, engine: EngineName
) -> None:
    """Raises ExportError when a bundle's mean divergence from its checkpoint is not allowed."""
    if allowed is not None and found > allowed:
        raise ExportError(
            f"{source}: the exported model's mean divergence from the checkpoint is {found:g} nats "
            f"over {positions} tokens, max_kl allows {allowed:g}; take more bits {BETTER[engine]}, "
            "or allow more; nothing was exported"
        )


def rounded(value: float) -> float:
    """To as many digits as a report shows."""
    return float(f"{value:.{DIGITS}g}")
