"""What an export costs in exactness: measured while exporting, printed, kept in the manifest."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field

import numpy as np

from stem_edge.bundle import KindError
from stem_edge.quantize import F32


@dataclass
class _Total:
    worst: float = 0.0
    sums: list[float] = field(default_factory=list)
    count: int = 0


@dataclass
class ErrorMeter:
    """Collects |stored - original| relative to the greatest magnitude of its row, by tensor kind.

    Relative to the row, because one scale for a whole matrix would hide errors in quiet rows.
    """

    _totals: dict[str, _Total] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, original: F32, stored: F32) -> None:
        """Account for rows [n, K] and what was stored for them. May be called from any thread."""
        peak = np.abs(original).max(axis=1, keepdims=True)
        error = np.abs(stored - original)
        error /= np.where(peak > 0, peak, 1)
        with self._lock:
            total = self._totals.setdefault(kind, _Total())
            total.worst = max(total.worst, float(error.max()))
            total.sums.append(float(error.sum(dtype=np.float64)))
            total.count += error.size

    def errors(self) -> dict[str, KindError]:
        """Worst and mean error of each kind; exact sums, so that the order of threads is no matter."""
        return {
            kind: KindError(round(total.worst, 6), round(math.fsum(total.sums) / total.count, 6))
            for kind, total in sorted(self._totals.items())
        }
