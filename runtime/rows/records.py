"""Records by number: the interface of the table store, and of edits that wrap it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from stem_edge.numerics.quantize import I64, U8
from stem_edge.tables.rows import RecordLayout

Flags: TypeAlias = npt.NDArray[np.bool_]
EMPTY = -1  # in place of a record or a slot: none
# Where records from two sources meet in one array, it is filled in parts of this size, because the
# memory plan does not count a second array. That many records keep flash busy.
READ_AT_ONCE = 32


@dataclass
class Traffic:
    """Bytes and requests that came over a network, since opening."""

    nbytes: int = 0
    requests: int = 0


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


class Records(Protocol):
    """A source of records: a table store, or edits over one. Threads may read at once."""

    layout: RecordLayout  # of records as `read` returns them
    tokens: int  # row ids that are token ids; made records have greater ones
    splits: bool  # True if the first rows of a record can be read alone
    distant: bool  # True if records come over a network

    def records_of(self, row_ids: I64) -> I64:
        """Record numbers of row ids, in the same shape."""

    def read(self, numbers: I64, whole: Flags | None = None) -> U8:
        """Read records uint8 [n, record_nbytes]; ascending numbers [n] are read fastest.

        whole [n]: False where only the first rows are needed; the rest may be zeros. Default: all True.
        Raises RowReadError if a record is unreadable or damaged.
        """

    def ahead(self, numbers: I64, whole: Flags) -> None:
        """Ask the system to begin reading records; returns at once, guarantees nothing."""

    def counters(self) -> RowCounters:
        """Counts since opening."""

    def stop(self) -> None:
        """Let reads over a network fail soon, including those under way."""

    def close(self) -> None:
        """Release memory, files and threads; later reads fail."""
