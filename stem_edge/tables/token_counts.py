"""Token counts of a text: token_counts.npy, which warms the row cache.

A plain .npy file, uint32 [V]. Its header is compared byte for byte, so that nothing in a foreign
file is ever interpreted.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stem_edge.files import disk
from stem_edge.files.disk import write_whole
from stem_edge.numerics.quantize import I32, I64

Counts: TypeAlias = npt.NDArray[np.uint32]
LARGEST = np.iinfo(np.uint32).max  # greater counts must not wrap around


def count_tokens(token_ids: I64, vocab_size: int) -> Counts:
    """Count the occurrences uint32 [V] of ids, all below vocab_size."""
    counts = np.bincount(token_ids, minlength=vocab_size)
    return np.minimum(counts, LARGEST).astype(np.uint32)


def counts_of_records(counts: Counts, index: I32 | None, records: int) -> Counts:
    """Sum the counts of the tokens that share each record."""
    if index is None:
        return counts
    sums = np.bincount(index, weights=counts, minlength=records)
    return np.minimum(sums, LARGEST).astype(np.uint32)


def encode_counts(counts: Counts) -> bytes:
    """Encode counts as the bytes of their file."""
    file = io.BytesIO()
    np.lib.format.write_array(file, counts.astype("<u4"), version=(1, 0), allow_pickle=False)
    return file.getvalue()


def read_counts(path: Path, length: int) -> Counts | None:
    """Read counts [length]; None if the file is missing, damaged or of another length.

    That is not an error, because only a warm start is lost.
    """
    nbytes = len(encode_counts(np.zeros(0, np.uint32))) + 4 * length
    try:
        data = disk.read_file(path, nbytes)
    except OSError:
        return None
    if len(data) != nbytes:
        return None
    counts = np.frombuffer(data[-4 * length :], "<u4").astype(np.uint32)
    return counts if encode_counts(counts) == data else None


def write_counts(path: Path, counts: Counts) -> None:
    """Write counts atomically. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, encode_counts(counts))
