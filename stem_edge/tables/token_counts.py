"""Counts of each token in a text. They say which tokens are rare.

A bundle's token_counts.npy is a plain .npy file, uint32 [V]. Its header is compared byte for byte, so that nothing in
a file from a stranger is ever interpreted.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stem_edge.files import disk
from stem_edge.numerics.quantize import I32, I64

Counts: TypeAlias = npt.NDArray[np.uint32]
LARGEST = np.iinfo(np.uint32).max  # greater counts are cut to this, and do not wrap around


def count_tokens(token_ids: I64, vocab_size: int) -> Counts:
    """Return how often each id occurs, uint32 [V]. All ids must be below vocab_size."""
    counts = np.bincount(token_ids, minlength=vocab_size)
    return np.minimum(counts, LARGEST).astype(np.uint32)


def counts_of_records(counts: Counts, index: I32 | I64 | None, records: int) -> Counts:
    """Sum each record's token counts. index: token -> record; None: token t has record t."""
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
    """Read counts [length]. Return None if the file is missing, damaged or of another length.

    A missing file is no error, because no answer depends on the counts.
    """
    header = len(encode_counts(np.zeros(0, np.uint32)))
    try:
        data = disk.read_file(path, header + 4 * length)
        counts = np.frombuffer(data[header:], "<u4")
    except (OSError, ValueError):
        return None
    whole = len(counts) == length and encode_counts(counts) == data
    return counts.astype(np.uint32) if whole else None
