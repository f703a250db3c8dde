"""Rows of a table store, read in one pass, and the spread of vectors over directions.

Records are read in batches of a few MB, and the store is mapped anew now and then, so that neither
our memory nor the mapped pages grow with the tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from stem_edge.bundle.table_arrays import Tables, open_tables
from stem_edge.errors import BundleError
from stem_edge.numerics.quantize import F32, I64, U8
from stem_edge.progress import Progress

BINS = 100  # of the histogram
# Percentiles at the ends of the histogram, because single outliers would put all pairs into one bin.
HISTOGRAM_RANGE = (0.05, 99.95)
THRESHOLDS = (0.1, 0.3, 0.5)
PERCENTILE = 95
GAUSSIAN_95 = NormalDist().inv_cdf(
    0.975
)  # deviations within which 95 % of a normal distribution lie
ROWS_AT_ONCE = 256  # of the matrix of all cosines
BATCH_NBYTES = 4 << 20
# Bytes, and rows in no order, that are read before the store is mapped anew, because pages that were
# read stay mapped until the maps are closed.
MAPPED_NBYTES = 256 << 20
SCATTERED = 128


def batches(root: Path, tokens: int, progress: Progress) -> Iterator[tuple[I64, Tables, U8]]:
    """Yield all tokens in order: ids [n], the open tables, records [n, record_nbytes]."""
    start = 0
    while start < tokens:
        with open_tables(root) as tables:
            # BATCH_NBYTES must be enough for a batch as it is stored, and as rows of one layer.
            nbytes, row_nbytes = tables.layout.record_nbytes, 4 * tables.layout.row_width
            size = max(1, BATCH_NBYTES // max(nbytes, row_nbytes))
            end = min(tokens, start + max(size, MAPPED_NBYTES // nbytes))
            for at in range(start, end, size):
                ids = np.arange(at, min(at + size, end))
                yield ids, tables, tables.records(ids)
                progress.advance(len(ids) * nbytes)
            start = end


def read_rows(root: Path, ids: I64, layer: int) -> F32:
    """Return rows [n, width] of ids, in any order."""
    pieces = []
    for at in range(0, len(ids), SCATTERED):
        with open_tables(root) as tables:
            pieces.append(tables[ids[at : at + SCATTERED], layer])
    return np.concatenate(pieces)


def all_norms(root: Path, tokens: int, layers: Sequence[int], show: bool | None) -> dict[int, F32]:
    """Return layer -> lengths of all rows [tokens]. Raises BundleError for values not finite."""
    with open_tables(root) as tables:
        total = tokens * tables.layout.record_nbytes
    norms = {layer: np.empty(tokens, np.float32) for layer in layers}
    with Progress(total, "reading rows", show) as progress:
        for ids, tables, records in batches(root, tokens, progress):
            for layer in layers:
                rows = tables.layout.unpack(records, tables.layers.index(layer))
                norms[layer][ids] = row_norms(rows, layer, int(ids[0]))
    return norms


def row_norms(rows: F32, layer: int, first: int) -> F32:
    """Return lengths [n] of rows [n, width] of the tokens from `first` on. Raises BundleError."""
    found = lengths(rows)
    if not np.isfinite(found).all():
        token = first + int(np.flatnonzero(~np.isfinite(found))[0])
        raise BundleError(
            f"row of token {token} in layer {layer} has values that are not finite; check the "
            "bundle with stem-edge verify, or export it again"
        )
    return found


def lengths(vectors: F32) -> F32:
    """Return lengths [n] of vectors [n, width]."""
    # Divide by the greatest value first, so that no square is too large or too small for float32.
    peaks = np.maximum(vectors.max(axis=1), -vectors.min(axis=1))
    peaks[peaks == 0] = 1
    with np.errstate(invalid="ignore"):
        parts = vectors / peaks[:, None]
        return np.asarray(peaks * np.sqrt(np.einsum("ij,ij->i", parts, parts)), np.float32)


@dataclass(frozen=True)
class CosineSpread:
    """Cosines of all pairs of `vectors` vectors, none of them zero."""

    vectors: int
    pairs: int
    mean: float
    deviation: float  # standard deviation
    least: float
    greatest: float
    p95_abs: float  # 95 % of the pairs have a |cos| up to this
    share_above: dict[float, float]  # threshold -> share of the pairs with a greater |cos|
    histogram_range: tuple[float, float]  # without the outermost pairs
    histogram: tuple[int, ...]  # pairs in each of BINS equal bins of this range


def spread(vectors: F32) -> CosineSpread | None:
    """Measure the spread of vectors [n, width] without zero ones; None if fewer than two are left."""
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
    return CosineSpread(
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
    """Return cosines [n (n - 1) / 2] of vectors [n, width], none of them zero: (0, 1), (0, 2), ..."""
    units, count = unit(vectors), len(vectors)
    found, filled = np.empty(count * (count - 1) // 2, np.float32), 0
    for start in range(0, count, ROWS_AT_ONCE):
        block = units[start : start + ROWS_AT_ONCE] @ units[start:].T
        for at, line in enumerate(block):
            rest = line[at + 1 :]
            found[filled : filled + len(rest)] = rest
            filled += len(rest)
    return np.clip(found, -1, 1, out=found)  # because rounding can go beyond


def unit(vectors: F32) -> F32:
    """Scale vectors [n, width] to length 1, except for zero ones."""
    found = lengths(vectors)[:, None]
    return np.asarray(vectors / np.where(found > 0, found, np.float32(1)), np.float32)


def random_p95(width: int) -> float:
    """Estimate P95 |cos| of random directions, whose cosines have a deviation of 1 / sqrt(width)."""
    return min(1.0, GAUSSIAN_95 / float(np.sqrt(width)))
