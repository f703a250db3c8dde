"""What an export costs in exactness: measured while exporting, printed, kept in the manifest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from stem_edge.bundle.quality_report import KindError
from stem_edge.numerics.quantize import F32


class Total(msgspec.Struct):
    """Sums over the values of one kind of tensor."""

    worst: float = 0.0
    sum: float = 0.0
    count: int = 0


class ErrorMeter:
    """Collects |stored - original| relative to the greatest magnitude of its row, by tensor kind.

    Relative to the row, because one scale for a whole matrix would hide errors in quiet rows.
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[Total]] = {}

    def add(self, kind: str, original: F32, stored: F32) -> None:
        """Account for rows [n, K] and what was stored for them. May be called from any thread."""
        peak = np.abs(original).max(axis=1, keepdims=True)
        error = stored - original
        np.abs(error, out=error)
        error /= np.where(peak > 0, peak, 1)
        part = Total(float(error.max()), float(error.sum(dtype=np.float64)), error.size)
        self._parts.setdefault(kind, []).append(part)  # threads append; they would lose an addition

    def totals(self) -> dict[str, Total]:
        """Sums by kind."""
        return {kind: _total(parts) for kind, parts in self._parts.items()}


def errors(totals: Iterable[Mapping[str, Total]]) -> dict[str, KindError]:
    """Worst and mean error of each kind over several meters."""
    kinds: dict[str, list[Total]] = {}
    for by_kind in totals:
        for kind, total in by_kind.items():
            kinds.setdefault(kind, []).append(total)
    found = {kind: _total(parts) for kind, parts in sorted(kinds.items())}
    return {k: KindError(round(t.worst, 6), round(t.sum / t.count, 6)) for k, t in found.items()}


def _total(parts: Iterable[Total]) -> Total:
    """Exact sums, so that the order of threads is no matter."""
    worst, sums, counts = zip(*((one.worst, one.sum, one.count) for one in parts), strict=True)
    return Total(max(worst), math.fsum(sums), sum(counts))
