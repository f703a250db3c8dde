"""What an export costs in exactness: measured while exporting, printed, kept in the manifest."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from stem_edge.bundle import KindError
from stem_edge.quantize import F32


class Total(msgspec.Struct):
    """Sums over the values of one kind of tensor."""

    worst: float = 0.0
    sum: float = 0.0
    count: int = 0


@dataclass
class ErrorMeter:
    """Collects |stored - original| relative to the greatest magnitude of its row, by tensor kind.

    Relative to the row, because one scale for a whole matrix would hide errors in quiet rows.
    """

    _totals: dict[str, Total] = field(default_factory=dict)
    _sums: dict[str, list[float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, original: F32, stored: F32) -> None:
        """Account for rows [n, K] and what was stored for them. May be called from any thread."""
        peak = np.abs(original).max(axis=1, keepdims=True)
        error = stored - original
        np.abs(error, out=error)
        error /= np.where(peak > 0, peak, 1)
        with self._lock:
            total = self._totals.setdefault(kind, Total())
            total.worst = max(total.worst, float(error.max()))
            total.count += error.size
            self._sums.setdefault(kind, []).append(float(error.sum(dtype=np.float64)))

    def totals(self) -> dict[str, Total]:
        """Sums by kind, exact, so that the order of threads is no matter."""
        return {
            kind: Total(total.worst, math.fsum(self._sums[kind]), total.count)
            for kind, total in self._totals.items()
        }


def errors(totals: Iterable[Mapping[str, Total]]) -> dict[str, KindError]:
    """Worst and mean error of each kind over several meters."""
    kinds: dict[str, list[Total]] = {}
    for by_kind in totals:
        for kind, total in by_kind.items():
            kinds.setdefault(kind, []).append(total)
    return {
        kind: KindError(
            round(max(part.worst for part in parts), 6),
            round(math.fsum(part.sum for part in parts) / sum(part.count for part in parts), 6),
        )
        for kind, parts in sorted(kinds.items())
    }
