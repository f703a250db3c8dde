"""Random rows for the row cache, to measure a backbone without reading its tables."""

from __future__ import annotations

import numpy as np

from stem_edge.numerics.quantize import I32
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.tables.packing import pack_records
from stem_edge.tables.rows import RecordLayout

PLACEHOLDERS = 16  # slots filled with random rows
PLACEHOLDERS_NBYTES = 32 << 20  # most bytes of their records; an expert has tens of megabytes


def placeholder_rows(layout: RecordLayout | None, tokens: int) -> tuple[ArraySlots | None, I32]:
    """Return row cache slots with random rows, and a slot id for each token, int32 [tokens].

    The values are about as large as the results of the matrix products that rows replace.
    """
    if layout is None:
        return None, np.zeros(tokens, np.int32)
    most = min(layout.records, PLACEHOLDERS, PLACEHOLDERS_NBYTES // layout.record_nbytes)
    slots, random = ArraySlots(layout, max(1, most)), np.random.default_rng(0)
    shape = (slots.count, layout.row_width)
    rows = [random.standard_normal(shape, np.float32) for _ in layout.layers]
    slots.write(np.arange(slots.count), pack_records(layout, rows))
    return slots, np.arange(tokens, dtype=np.int32) % slots.count
