"""Errors of quantization, measured during an export for the report and the manifest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from stem_edge.bundle.manifest import KindError
from stem_edge.numerics.quantize import F32


class Total(msgspec.Struct):
    """Sums over the values of one kind of tensor."""

    worst: float = 0.0
    sum: float = 0.0
    count: int = 0


class ErrorMeter:
    """Meter of |stored - original| relative to the greatest magnitude of its row, by tensor kind.

    Relative to the row, because relative to the whole matrix, errors of small rows would not show.
    """

    def __init__(self) -> None:
        self._parts: dict[str, list[Total]] = {}

    def add(self, kind: str, original: F32, stored: F32) -> None:
        """Count the errors of rows [n, K]. May be called from any thread."""
        peak = np.abs(original).max(axis=1, keepdims=True)
        error = stored - original
        np.abs(error, out=error)
        error /= np.where(peak > 0, peak, 1)
        part = Total(float(error.max()), float(error.sum(dtype=np.float64)), error.size)
        # Appended instead of added up, because `+=` of several threads loses some.
        self._parts.setdefault(kind, []).append(part)

    def totals(self) -> dict[str, Total]:
        """Return the sums by kind."""
        return {kind: _total(parts) for kind, parts in self._parts.items()}


def errors(totals: Iterable[Mapping[str, Total]]) -> dict[str, KindError]:
    """Return the worst and mean error of each kind over several meters."""
    kinds: dict[str, list[Total]] = {}
    for by_kind in totals:
        for kind, total in by_kind.items():
            kinds.setdefault(kind, []).append(total)
    found = {kind: _total(parts) for kind, parts in sorted(kinds.items())}
    return {k: KindError(round(t.worst, 6), round(t.sum / t.count, 6)) for k, t in found.items()}


def _total(parts: Iterable[Total]) -> Total:
    """Add up exactly, so that the order of threads does not change the sum."""
    worst, sums, counts = zip(*((part.worst, part.sum, part.count) for part in parts), strict=True)
    return Total(max(worst), math.fsum(sums), sum(counts))
