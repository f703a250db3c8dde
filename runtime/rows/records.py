"""What the cache, the table store and edits say to each other about records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from stem_edge.numerics.quantize import I64

Flags: TypeAlias = npt.NDArray[np.bool_]
EMPTY = -1  # in place of a record or a slot: none
# Where records from two sources meet in one array, it is filled in parts of this size, because the
# memory plan does not count a second array. That many records keep flash busy.
READ_AT_ONCE = 32


class Missing(NamedTuple):
    """Records to read."""

    numbers: I64  # [n], distinct and ascending
    whole: Flags  # [n], False where the rows that prompts need are enough


@dataclass(frozen=True)
class RowCounters:
    """Counts since the model was loaded."""

    hits: int = 0  # uses of records that were in the row cache
    misses: int = 0
    bytes_read: int = 0  # from flash
    stall_seconds: float = 0.0  # time that steps waited for records
    uploaded_rows: int = 0  # records copied to a device
    uploaded_bytes: int = 0
    network_bytes: int = 0  # of tables on another machine
    network_reads: int = 0  # requests for them

    def __add__(self, more: RowCounters) -> RowCounters:
        pairs = zip(vars(self).values(), vars(more).values(), strict=True)
        return RowCounters(*(one + other for one, other in pairs))

    def __sub__(self, before: RowCounters) -> RowCounters:
        pairs = zip(vars(self).values(), vars(before).values(), strict=True)
        return RowCounters(*(after - earlier for after, earlier in pairs))
