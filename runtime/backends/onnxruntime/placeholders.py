"""Random rows for the row cache, to measure a backbone without reading its tables."""

from __future__ import annotations

import numpy as np

from stem_edge.numerics.quantize import I32
from stem_edge.runtime.rows.slots import Slots
from stem_edge.tables.packing import pack_records
from stem_edge.tables.rows import RecordLayout

PLACEHOLDERS = 16  # slots filled with placeholder rows
PLACEHOLDERS_NBYTES = 32 << 20  # most bytes of their records; an expert has tens of megabytes


def placeholders(layout: RecordLayout) -> int:
    """Return the number of row cache slots that are filled with random rows: 16, or fewer if records are large."""
    return max(1, min(layout.records, PLACEHOLDERS, PLACEHOLDERS_NBYTES // layout.record_nbytes))


def placeholder_rows(slots: Slots | None, tokens: int) -> I32:
    """Fill row cache slots with random rows; return a slot id for each token, int32 [tokens].

    The values are about as large as the results of the matrix products that rows replace.
    """
    if slots is None:
        return np.zeros(tokens, np.int32)
    layout, random = slots.layout, np.random.default_rng(0)
    count = min(slots.count, placeholders(layout))
    shape = (count, layout.row_width)
    rows = [random.standard_normal(shape, np.float32) for _ in layout.layers]
    slots.write(np.arange(count), pack_records(layout, rows))
    return np.arange(tokens, dtype=np.int32) % count
