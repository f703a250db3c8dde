"""How vectors spread over directions: the cosines of all pairs of a sample, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from stem_edge.quantize import F32

BINS = 100  # of the histogram
# Percentiles that the histogram reaches from and to: single pairs far out would make it all one bin.
HISTOGRAM_RANGE = (0.05, 99.95)
THRESHOLDS = (0.1, 0.3, 0.5)
PERCENTILE = 95
NORMAL = NormalDist()
GAUSSIAN_95 = NORMAL.inv_cdf(0.975)  # 95 % of a normal distribution lie within so many deviations
ROWS_AT_ONCE = 256  # of the matrix of all cosines


@dataclass(frozen=True)
class Spread:
    """Cosines of all pairs of `vectors` vectors, none of them zero."""

    vectors: int
    pairs: int
    mean: float
    deviation: float  # standard deviation
    least: float
    greatest: float
    p95_abs: float  # 95 % of the pairs have a |cos| up to this
    share_above: dict[float, float]  # of THRESHOLDS: share of the pairs whose |cos| is greater
    histogram_range: tuple[float, float]  # without the outermost pairs
    histogram: tuple[int, ...]  # pairs in each of BINS equal bins of this range


def spread(vectors: F32) -> Spread | None:
    """Of vectors [n, width], those of zeros left out; None if that leaves fewer than two."""
    present = vectors.any(axis=1)
    vectors = vectors if present.all() else vectors[present]
    if len(vectors) < 2:
        return None
    cosines = pair_cosines(vectors)
    low, high = np.percentile(cosines, HISTOGRAM_RANGE).tolist()
    histogram, edges = np.histogram(cosines, BINS, (low, high))
    mean, deviation = cosines.mean(dtype=np.float64), cosines.std(dtype=np.float64)
    least, greatest = float(cosines.min()), float(cosines.max())
    size = np.abs(cosines, out=cosines)
    return Spread(
        vectors=len(vectors),
        pairs=len(cosines),
        mean=float(mean),
        deviation=float(deviation),
        least=least,
        greatest=greatest,
        share_above={at: float((size > at).mean()) for at in THRESHOLDS},
        p95_abs=float(np.percentile(size, PERCENTILE, overwrite_input=True)),
        histogram_range=(float(edges[0]), float(edges[-1])),
        histogram=tuple(histogram.tolist()),
    )


def pair_cosines(vectors: F32) -> F32:
    """Cosines [n (n - 1) / 2] of vectors [n, width], none of them zero: (0, 1), (0, 2), ..."""
    units, count = unit(vectors), len(vectors)
    found, filled = np.empty(count * (count - 1) // 2, np.float32), 0
    for start in range(0, count, ROWS_AT_ONCE):
        block = units[start : start + ROWS_AT_ONCE] @ units[start:].T
        for at, line in enumerate(block):
            rest = line[at + 1 :]
            found[filled : filled + len(rest)] = rest
            filled += len(rest)
    return np.clip(found, -1, 1, out=found)  # rounding goes beyond


def unit(vectors: F32) -> F32:
    """Vectors [n, width] at length 1; those of zeros stay as they are."""
    # First by the greatest value, so that no square is too large or too small for float32.
    peaks = np.maximum(vectors.max(axis=1), -vectors.min(axis=1))[:, None]
    units = np.asarray(vectors / np.where(peaks > 0, peaks, np.float32(1)), np.float32)
    lengths = np.sqrt(np.einsum("ij,ij->i", units, units))[:, None]
    units /= np.where(lengths > 0, lengths, np.float32(1))
    return units


def random_p95(width: int) -> float:
    """P95 |cos| of random directions, about: their cosines have a deviation of 1 / sqrt(width)."""
    return min(1.0, GAUSSIAN_95 / float(np.sqrt(width)))


def random_nearest(width: int, count: int) -> float:
    """The greatest cosine of `count` random directions with another one, about."""
    return min(1.0, NORMAL.inv_cdf(1 - 1 / (count + 1)) / float(np.sqrt(width)))
