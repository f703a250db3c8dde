"""Builds the records of edited tokens from other tokens' table rows or from new rows.

A composed record has the layout of a stored record, so row cache and graphs treat both alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from stem_edge.numerics.block_search import least_error_scales
from stem_edge.numerics.quantize import F32, U8
from stem_edge.tables.packing import pack_records
from stem_edge.tables.rows import RecordLayout, RowLookup


def compose(layout: RecordLayout, lookup: RowLookup, records: Mapping[int, U8]) -> U8:
    """Build an edited token's record [record_nbytes]: its row in each layer is copied or averaged.

    lookup: for each STEM layer, a packed row or token ids. The packed row, or the row of a single id, is copied.
    Rows of several ids are averaged in float32 and packed again. records: token id -> stored record.
    """
    record = np.empty(layout.record_nbytes, np.uint8)
    for index, row in enumerate(lookup):
        piece = slice(index * layout.row_nbytes, (index + 1) * layout.row_nbytes)
        if isinstance(row, bytes):
            record[piece] = np.frombuffer(row, np.uint8)
        elif len(set(row)) == 1:
            record[piece] = records[row[0]][piece]
        else:
            rows = [layout.unpack(records[token][None], index)[0] for token in row]
            record[piece] = np.frombuffer(pack_row(layout, mean(rows)), np.uint8)
    return record


def mean(rows: Sequence[F32]) -> F32:
    """Return the mean of rows [d_ff], summed in float32 in the given order."""
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return np.asarray(total / np.float32(len(rows)), np.float32)


def pack_row(layout: RecordLayout, values: F32) -> bytes:
    """Encode a float32 row [row_width] as its codes and scales. ValueError above fp16's range."""
    single = msgspec.structs.replace(layout, records=1, layers=(0,))
    return pack_records(single, [values[None]], least_error_scales).tobytes()


def is_row(layout: RecordLayout, row: bytes) -> bool:
    """Return True if these bytes are a packed row of finite values."""
    if len(row) != layout.row_nbytes:
        return False
    single = msgspec.structs.replace(layout, records=1, layers=(0,))
    with np.errstate(all="ignore"):  # scales from outside may overflow
        values = single.unpack(np.frombuffer(row, np.uint8)[None], 0)
    return bool(np.isfinite(values).all())


def token_of(lookup: RowLookup) -> int | None:
    """Return the token id whose row a lookup uses in every layer; None if there is no such id."""
    first = lookup[0]
    if isinstance(first, tuple) and len(set(first)) == 1 and set(lookup) == {first}:
        return first[0]
    return None


def tokens_of(lookup: RowLookup) -> list[int]:
    """Return the ids of all tokens whose stored rows a lookup copies or averages, ascending."""
    return sorted({token for row in lookup if isinstance(row, tuple) for token in row})
