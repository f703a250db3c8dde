"""The row cache: rows in slots in memory, evicted by least frequent use with ageing.

The slots are inputs of the graph: an engine binds their memory once, and a step passes their numbers.
Bookkeeping is in numpy arrays over record numbers and slots, so that a prompt chunk is one vectorised
operation and the memory is known exactly. A slot may hold only the first rows of its record, enough
for most tokens of a prompt; it gets the others when a token needs them.

Not thread-safe: only the caller that has the engine's turn may use it.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from stem_edge.bundle.footprint import SLOT_BOOKKEEPING_NBYTES
from stem_edge.numerics.quantize import I64
from stem_edge.runtime.rows.records import Flags
from stem_edge.runtime.rows.slots import Slots, Staged
from stem_edge.tables.token_counts import Counts

# Counts are halved after this many uses per slot: often enough to follow a change of topic, rarely
# enough to remember frequent words. Chosen on real text with 512 to 8192 slots
# (tools/experiments/simulate_cache.py).
AGEING_USES_PER_SLOT = 8
# Ageing keeps counts far below this; the limit only prevents them from wrapping around.
MOST_USES = 1 << 30
EMPTY = -1


class RowCache:
    """Map of records to slots of `storage`; a record has the rows of all STEM layers."""

    def __init__(self, storage: Slots) -> None:
        layout, slots = storage.layout, storage.count
        self.layout, self.slots, self.storage = layout, slots, storage
        self._slot_of = np.full(layout.records, EMPTY, np.int32)  # record -> slot
        self._record_of = np.full(slots, EMPTY, np.int64)  # slot -> record
        self._count = np.zeros(layout.records, np.uint32)  # uses of each record, halved at times
        self._whole = np.zeros(slots, np.bool_)  # slots with all rows of their record
        self._last_use = np.zeros(slots, np.int64)  # slot -> clock; breaks ties between counts
        self._clock = 0
        self.filled = 0  # slots used so far; unused ones are taken in order
        self._uses_to_ageing = AGEING_USES_PER_SLOT * slots
        self.hits = 0  # uses that needed no read, or the read of another use in the same step
        self.misses = 0  # records to read

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot, with its bookkeeping."""
        return self.storage.slot_nbytes + SLOT_BOOKKEEPING_NBYTES

    @property
    def counts(self) -> Counts:
        """Uses of each record of the table store, halved at times."""
        return self._count[: self.layout.records]

    def expect_counts(self, counts: Counts) -> I64:
        """Start as if these uses had been seen; return the most used records, best first.

        Together they weigh as much as the uses between two halvings, so that new text
        soon outweighs them.
        """
        total = int(counts.sum(dtype=np.uint64))
        if not total:
            return np.zeros(0, np.int64)
        scale = AGEING_USES_PER_SLOT * self.slots / total
        self._count[:] = counts * scale
        used = np.flatnonzero(counts)
        best = used[np.argsort(counts[used], kind="stable")[::-1]]
        return np.asarray(best[: self.slots], np.int64)

    def make_room(self, numbers: int) -> None:
        """Extend the bookkeeping to records 0..numbers-1; edits number theirs after the store's."""
        more = numbers - len(self._slot_of)
        if more > 0:
            # In this order, because len(_slot_of) must never claim room that _count lacks.
            self._count = np.append(self._count, np.zeros(more, np.uint32))
            self._slot_of = np.append(self._slot_of, np.full(more, EMPTY, np.int32))

    def forget(self, numbers: I64) -> None:
        """Empty the slots of these records, because their numbers will be given to others."""
        slots = self._slot_of[numbers]
        self._slot_of[numbers], self._count[numbers] = EMPTY, 0
        self._record_of[slots[slots != EMPTY]] = EMPTY

    def missing(self, wanted: I64, whole: int | None = None) -> I64:
        """Return the distinct records to read, ascending: in no slot, or needed whole and not so.

        whole: of how many of the last records all rows are needed; default: of all.
        """
        # Not np.unique, whose first call takes 15 ms to import masked arrays.
        distinct = np.array(sorted(set(wanted.tolist())), np.int64)
        slots = self._slot_of[distinct]
        partial = needed_whole(distinct, wanted, whole) & ~self._whole[slots]
        return np.asarray(distinct[(slots == EMPTY) | partial], np.int64)

    def slots_of(self, wanted: I64) -> npt.NDArray[np.int32]:
        """Slot of each record [T]; all must be resident."""
        return self._slot_of[wanted]

    def use(self, wanted: I64, whole: int | None = None) -> None:
        """Count one use of each record [T]; call it before they are fetched. whole: as `missing`."""
        slots = self._slot_of[wanted]
        resident = slots[slots != EMPTY]
        there = (slots != EMPTY) & (self._whole[slots] | ~needed_whole(wanted, wanted, whole))
        read = len(set(wanted[~there].tolist()))
        self.misses += read
        self.hits += len(wanted) - read
        if len(wanted) and self._count[wanted].max() > MOST_USES:
            self._count >>= 1
        np.add.at(self._count, wanted, 1)
        self._clock += 1
        self._last_use[resident] = self._clock
        self._uses_to_ageing -= len(wanted)
        if self._uses_to_ageing <= 0:
            self._count >>= 1
            self._uses_to_ageing = AGEING_USES_PER_SLOT * self.slots

    def install(
        self, numbers: I64, records: Staged, keep: I64, whole: Flags | Literal[True] = True
    ) -> None:
        """Put records [n], staged or not, into slots without evicting any of `keep`.

        They are absent, or in `keep` and not whole. whole [n]: which have all their rows.
        """
        slots = self._slot_of[numbers].astype(np.intp)
        absent = slots == EMPTY
        slots[absent] = self._victims(int(absent.sum()), keep)
        evicted = self._record_of[slots]
        # An interrupt anywhere below must not leave _slot_of pointing to a slot with other rows. It
        # can leave _record_of naming a record that has since moved, hence the second condition.
        stale = (evicted == EMPTY) | (self._slot_of[evicted] != slots)
        self._slot_of[evicted[~stale]] = EMPTY
        self._record_of[slots] = EMPTY
        self.storage.write(slots, records)
        self._whole[slots] = whole
        self._record_of[slots] = numbers
        self._slot_of[numbers] = slots
        self._last_use[slots] = self._clock

    def _victims(self, count: int, keep: I64) -> npt.NDArray[np.intp]:
        """Choose `count` slots: empty ones first, then the least used; of these, the longest unused."""
        if self.filled + count <= self.slots:
            self.filled += count
            return np.arange(self.filled - count, self.filled, dtype=np.intp)
        self.filled = self.slots
        held = self._record_of
        # One key to sort by instead of two: the count, then the time of the last use below it.
        order = np.minimum(self._count[held], MOST_USES).astype(np.int64) << 32
        order += self._last_use
        order[held == EMPTY] = -1
        kept = self._slot_of[keep]
        order[kept[kept != EMPTY]] = np.iinfo(np.int64).max
        if count == 1:
            return np.array([order.argmin()], np.intp)
        return np.argpartition(order, count - 1)[:count]


def needed_whole(numbers: I64, wanted: I64, whole: int | None) -> Flags:
    """Return for records [n] whether they are among the last `whole` of `wanted`; None: all are."""
    if whole is None or whole >= len(wanted):
        return np.ones(len(numbers), np.bool_)
    return np.isin(numbers, wanted[len(wanted) - whole :])
