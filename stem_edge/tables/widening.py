"""Converts rare tokens' records, which have fewer bits, to the layout of frequent tokens' records."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

from stem_edge.numerics.quantize import U8
from stem_edge.numerics.quantizing import pack_codes, unpack_codes
from stem_edge.tables.codecs import CODECS, Form, RowType, form_of
from stem_edge.tables.rows import RecordLayout


def widen(layout: RecordLayout, records: U8, wide: RecordLayout) -> U8:
    """Convert records [n, nbytes] to `wide`, a layout with more bits, without rounding."""
    made = np.empty((len(records), wide.record_nbytes), np.uint8)
    (codes, scales), (narrow, kept) = wide.split(made), layout.split(records)
    numbers, dtype = _of_bytes(layout.row_type, form_of(wide.row_type))
    codes[:] = numbers[narrow.view(np.uint8)].view(dtype)
    scales[:] = kept
    return made


@cache
def _of_bytes(stored: RowType, form: Form) -> tuple[npt.NDArray[np.uint], np.dtype[np.generic]]:
    """Return an array [256] that maps a byte of `stored` codes to `form` codes, and its dtype."""
    every = np.arange(256, dtype=np.uint8)[:, None]
    narrow, bits = CODECS[stored].bits, CODECS[form].bits
    more = np.uint8((1 << bits - 1) - (1 << narrow - 1))  # between the codes of zero
    wide = pack_codes(unpack_codes(every, narrow) + more, bits)
    return wide.view(f"u{wide[0].nbytes}")[:, 0], wide.dtype
