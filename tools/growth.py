"""Measures what a process leaks in a long run: growth of memory, threads and open files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WARM_UP = 0.3  # share of the samples left out, because some memory is allocated once and kept


@dataclass(frozen=True)
class Sample:
    """Resources that a process holds after some work."""

    done: int  # generations or requests
    seconds: float
    memory: int  # bytes, anonymous and in swap
    threads: int
    files: int


@dataclass(frozen=True)
class Growth:
    """Growth of a process's resources over a long run, without the warm-up."""

    slope: float  # bytes per 10,000 generations or requests
    error: float  # standard error of the slope, because memory goes up and down by itself
    more_threads: int
    more_files: int

    def flat(self, max_slope: float) -> bool:
        """Return False if memory certainly grows by max_slope, or if threads or files grow."""
        least = self.slope - 2 * self.error
        return least < max_slope and self.more_threads <= 0 and self.more_files <= 0

    def line(self, last: Sample) -> str:
        """Return the growth as text. last: the last sample of the run."""
        return (
            f"memory {last.memory / 2**20:.1f} MiB, {self.slope / 2**20:+.2f} MiB per 10,000 "
            f"(standard error {self.error / 2**20:.2f}); "
            f"threads {self.more_threads:+d}, open files {self.more_files:+d}"
        )


def growth(samples: Sequence[Sample]) -> Growth:
    """Fit the growth of memory; compare peaks of threads and files in both halves of the run."""
    warm = samples[int(WARM_UP * len(samples)) :]
    done, memory = np.array([[sample.done, sample.memory] for sample in warm], float).T
    slope = error = 0.0
    if len(warm) > 2 and np.ptp(done):
        (slope, _), covariance = np.polyfit(done, memory, 1, cov=True)
        error = float(covariance[0, 0]) ** 0.5
    early, late = warm[: (len(warm) + 1) // 2], warm[len(warm) // 2 :]
    return Growth(
        float(slope) * 10_000,
        error * 10_000,
        max(sample.threads for sample in late) - max(sample.threads for sample in early),
        max(sample.files for sample in late) - max(sample.files for sample in early),
    )
