"""Counts that warm the row cache: of the tokens of a text, and of records used in earlier runs.

Both are plain .npy files: uint32 [V] in a bundle's token_counts.npy, and pairs uint32 [n, 2] of a record
and its use count in the user's cache folder. Headers are compared byte for byte, so that nothing in a
foreign file is ever interpreted.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from stem_edge.files import disk
from stem_edge.files.disk import write_whole
from stem_edge.numerics.quantize import I32, I64

Counts: TypeAlias = npt.NDArray[np.uint32]
MOST_SAVED = 1 << 16  # records whose uses are saved, more than a warm start has time to read
LARGEST = np.iinfo(np.uint32).max  # greater counts must not wrap around


class Uses(NamedTuple):
    """Record numbers, and how often each record was used."""

    records: I64  # [n], distinct
    counts: Counts  # [n]


def count_tokens(token_ids: I64, vocab_size: int) -> Counts:
    """Return how often each id occurs, uint32 [V]. All ids must be below vocab_size."""
    counts = np.bincount(token_ids, minlength=vocab_size)
    return np.minimum(counts, LARGEST).astype(np.uint32)


def counts_of_records(counts: Counts, index: I32 | I64 | None, records: int) -> Counts:
    """Return a count for each record: the sum of the counts of all tokens that share it."""
    if index is None:
        return counts
    sums = np.bincount(index, weights=counts, minlength=records)
    return np.minimum(sums, LARGEST).astype(np.uint32)


def encode_counts(counts: Counts) -> bytes:
    """Encode counts as the bytes of a .npy file."""
    file = io.BytesIO()
    np.lib.format.write_array(file, counts.astype("<u4"), version=(1, 0), allow_pickle=False)
    return file.getvalue()


def read_counts(path: Path, length: int) -> Counts | None:
    """Read counts [length]; None if the file is missing, damaged or of another length.

    That is not an error, because only a warm start is lost.
    """
    counts = _read(path, length)
    return None if counts is None or len(counts) != length else counts.astype(np.uint32)


def read_uses(path: Path, records: int) -> Uses | None:
    """Read use counts of records 0 to records - 1; None if the file is missing or damaged."""
    pairs = _read(path, 2 * MOST_SAVED, 2)
    if pairs is None or not (pairs[:, 0] < records).all():
        return None
    return Uses(pairs[:, 0].astype(np.int64), pairs[:, 1].astype(np.uint32))


def _read(path: Path, most: int, *columns: int) -> Counts | None:
    """Read an array [n, *columns] of up to `most` values; None if the file is missing or damaged."""
    header = len(encode_counts(np.zeros((0, *columns), np.uint32)))
    try:
        data = disk.read_file(path, header + 4 * most)
        found = np.frombuffer(data[header:], "<u4").reshape(-1, *columns)
    except (OSError, ValueError):
        return None
    return found if encode_counts(found) == data else None


def write_uses(path: Path, uses: Uses) -> None:
    """Write the counts of the most used records atomically. Raises OSError."""
    best = np.argsort(uses.counts, kind="stable")[::-1][:MOST_SAVED]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, encode_counts(np.stack([uses.records[best], uses.counts[best]], axis=1)))
