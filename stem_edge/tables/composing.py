"""Builds the records of edited tokens from other tokens' table rows.

A composed record has the layout of a stored record, so row cache and graphs treat both alike.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from stem_edge.numerics.block_search import least_error_scales
from stem_edge.numerics.quantize import U8
from stem_edge.tables.packing import pack_records
from stem_edge.tables.rows import RecordLayout, RowLookup


def compose(layout: RecordLayout, lookup: RowLookup, records: Mapping[int, U8]) -> U8:
    """Build an edited token's record [record_nbytes]: its row in each layer is copied or averaged.

    lookup: token ids for each STEM layer. The row of a single id is copied. Rows of several ids are
    averaged in float32 and packed again. records: token id -> stored record.
    """
    record = np.empty(layout.record_nbytes, np.uint8)
    for index, row in enumerate(lookup):
        piece = slice(index * layout.row_nbytes, (index + 1) * layout.row_nbytes)
        if len(set(row)) == 1:
            record[piece] = records[row[0]][piece]
        else:
            rows = [layout.unpack(records[token][None], index)[0] for token in row]
            single = msgspec.structs.replace(layout, records=1, layers=(0,))
            mean = np.mean(rows, axis=0, keepdims=True)
            record[piece] = pack_records(single, [mean], least_error_scales)
    return record


def token_of(lookup: RowLookup) -> int | None:
    """Return the token id whose row a lookup uses in every layer; None if there is no such id."""
    first = lookup[0]
    return first[0] if len(set(first)) == 1 and set(lookup) == {first} else None


def tokens_of(lookup: RowLookup) -> list[int]:
    """Return the ids of all tokens whose stored rows a lookup copies or averages, ascending."""
    return sorted({token for row in lookup for token in row})
