"""Slots for tokens whose rows nobody reads, to try or measure a backbone without its tables."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stem_edge.rows import RecordLayout

ROWS_NBYTES = 32 << 20  # of such rows, at most


def slot_ids(layout: RecordLayout | None, tokens: int) -> npt.NDArray[np.int32]:
    """A slot for each of so many tokens: one of its own, while they are few and small."""
    if layout is None:
        return np.zeros(tokens, np.int32)
    slots = max(1, min(layout.records, ROWS_NBYTES // layout.record_nbytes))
    return np.arange(tokens, dtype=np.int32) % slots
