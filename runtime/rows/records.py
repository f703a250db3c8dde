"""Records by their numbers: what the row store gives, and each tier over it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from stem_edge.numerics.quantize import I32, I64, U8
from stem_edge.tables.rows import RecordLayout

Flags: TypeAlias = npt.NDArray[np.bool_]
# Where records from two sources meet in one array, it is filled in parts of this size, because the
# memory plan does not count a second array. That many records keep flash busy.
READ_AT_ONCE = 32


@dataclass(frozen=True)
class RowCounters:
    """Counts since the model was loaded."""

    hits: int = 0  # uses of records that were in the row cache
    misses: int = 0
    bytes_read: int = 0  # from flash
    stall_seconds: float = 0.0  # time that fetch waited for records
    uploaded_rows: int = 0  # records copied to a device
    uploaded_bytes: int = 0
    network_bytes: int = 0  # read from tables that are elsewhere
    network_reads: int = 0  # requests for them

    def __add__(self, more: RowCounters) -> RowCounters:
        pairs = zip(vars(self).values(), vars(more).values(), strict=True)
        return RowCounters(*(one + other for one, other in pairs))

    def __sub__(self, before: RowCounters) -> RowCounters:
        pairs = zip(vars(self).values(), vars(before).values(), strict=True)
        return RowCounters(*(after - earlier for after, earlier in pairs))


class Records(Protocol):
    """A source of records. Tiers are each one over another, and add their counts to its counts."""

    layout: RecordLayout  # of records as `read` returns them
    tokens: int  # that have a record
    index: I32 | None  # token -> record; None: record i is token i's
    splits: bool  # whether the first rows of a record can be read alone
    distant: bool  # whether records come over a network, by reads that are repeated until they fail

    def read(self, numbers: I64, whole: Flags | None = None) -> U8:
        """Read records uint8 [n, record_nbytes] by their numbers [n].

        whole [n]: False where only the first rows are needed; default: all True. Raises RowReadError.
        """

    def ahead(self, numbers: I64, whole: Flags) -> None:
        """Let the system begin to read records that `read` will want soon; here, do nothing."""
        return

    def counters(self) -> RowCounters:
        """Return the counts of this source and those below, since opening."""

    def stop(self) -> None:
        """Let reads over a network fail soon, as a thread may wait for them that is to end."""

    def close(self) -> None:
        """Release memory, files and threads; later reads fail."""


@dataclass
class Traffic:
    """Bytes and requests that came over a network, since opening."""

    nbytes: int = 0
    requests: int = 0


class RowKeys:
    """Which rows tokens look up, by the text so far; in this base class, each its own."""

    before = 0  # tokens before a step that it needs to know
    each = 1  # rows that a token looks up, as the last of its keys
    others = 0  # rows of tokens before a step that it needs, too
    made = True  # whether tokens may look up rows that edits make
    most = sys.maxsize  # tokens of a step

    def of(self, token_ids: I64, row_ids: I64, first: int = 0) -> I64:
        """Row ids that tokens [T] of a text look up, from the `first` on: [T - first, ...].

        row_ids [T]: of their own rows. Before the first are as many tokens as `before`, or all.
        """
        return row_ids[first:]


def records_of(store: Records, tokens: I64) -> I64:
    """Return the numbers [T] of the records that hold the rows of tokens [T]."""
    return tokens if store.index is None else store.index[tokens].astype(np.int64)
