"""Measures quantization errors during an export, for the report and the manifest."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from stem_edge.bundle.manifest import KindError
from stem_edge.numerics.quantize import F32


class ErrorMeter:
    """Collects quantization errors of each kind of tensor: |stored - original| / row's peak.

    A row's peak is its greatest magnitude. Relative to a matrix's peak, errors of small rows would not show.
    """

    def __init__(self) -> None:
        # Kind, worst error, sum and count of the rows that were added, in the order of the threads.
        self.parts: list[tuple[str, float, float, int]] = []

    def add(self, kind: str, original: F32, stored: F32) -> None:
        """Add the errors of rows [n, K] of a tensor of this kind. May be called from any thread."""
        peak = np.abs(original).max(axis=1, keepdims=True)
        error = stored - original
        np.abs(error, out=error)
        error /= np.where(peak > 0, peak, 1)
        # Appended instead of added up, because `+=` of several threads loses some.
        self.parts.append(
            (kind, float(error.max()), float(error.sum(dtype=np.float64)), error.size)
        )


def errors(meters: Iterable[ErrorMeter]) -> dict[str, KindError]:
    """Combine the meters' errors: kind of tensor -> worst and mean error."""
    kinds = dict[str, list[tuple[float, float, int]]]()
    for meter in meters:
        for kind, worst, summed, count in meter.parts:
            kinds.setdefault(kind, []).append((worst, summed, count))
    found = dict[str, KindError]()
    for kind in sorted(kinds):
        worsts, sums, counts = zip(*kinds[kind], strict=True)
        # Added up exactly, so that the order of threads does not change the sum.
        found[kind] = KindError(round(max(worsts), 6), round(math.fsum(sums) / sum(counts), 6))
    return found
