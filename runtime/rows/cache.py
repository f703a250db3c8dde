"""The row cache: slots in memory that hold recent rows, evicted by aged LFU.

The slots are the backbone graph's inputs (stem_edge.runtime.rows.slots): an engine binds their memory
once, and a step passes only slot numbers. All bookkeeping is numpy arrays over record numbers and
slots, so a prompt chunk is one vectorised operation and the memory is exact: `slot_nbytes` for each
slot. A record is one token's unless the table store has an index: the prefetcher knows which.

Not thread-safe: only the thread that runs the engine may call it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stem_edge.bundle.footprint import SLOT_BOOKKEEPING_NBYTES
from stem_edge.numerics.quantize import I64
from stem_edge.runtime.rows.slots import Slots, Staged
from stem_edge.tables.token_counts import Counts

# Counts are halved after this many uses per slot: short enough to follow a change of topic, long
# enough to know the frequent words. Chosen on real text with 512 to 8192 slots
# (tools/experiments/simulate_cache.py).
AGEING_USES_PER_SLOT = 8
# Counts stay far below this, unless something is wrong; beyond, they would wrap around.
MOST_USES = 1 << 30
EMPTY = -1


class RowCache:
    """Which record is in which slot of `storage`: all STEM layers of as many records as it holds."""

    def __init__(self, storage: Slots) -> None:
        layout, slots = storage.layout, storage.count
        self.layout, self.slots, self.storage = layout, slots, storage
        self._slot_of = np.full(layout.records, EMPTY, np.int32)  # record -> slot
        self._record_of = np.full(slots, EMPTY, np.int64)  # slot -> record
        self._count = np.zeros(layout.records, np.uint32)  # uses, halved now and then
        self._last_use = np.zeros(slots, np.int64)  # slot -> clock: breaks ties between counts
        self._clock = 0
        self.filled = 0  # slots that were ever used; they are taken in order
        self._uses_to_ageing = AGEING_USES_PER_SLOT * slots
        self.hits = 0  # uses of records that were in a slot when a step asked for them
        self.misses = 0

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot: its rows and its bookkeeping."""
        return self.storage.slot_nbytes + SLOT_BOOKKEEPING_NBYTES

    @property
    def counts(self) -> Counts:
        """How often each record of the table store was used, halved now and then."""
        return self._count[: self.layout.records]

    def expect_counts(self, counts: Counts, weight: float = 1.0) -> I64:
        """Begin as if these uses of records had been seen; the most used ones, best first.

        They weigh as much as all uses between two halvings, so that new text soon outweighs them;
        with a `weight`, so many times as much.
        """
        total = int(counts.sum(dtype=np.uint64))
        if not total:
            return np.zeros(0, np.int64)
        scale = weight * AGEING_USES_PER_SLOT * self.slots / total
        self._count[:] = counts * scale
        used = np.flatnonzero(counts)
        best = used[np.argsort(counts[used], kind="stable")[::-1]]
        return np.asarray(best[: self.slots], np.int64)

    def make_room(self, numbers: int) -> None:
        """Know records 0..numbers-1: those that edits make are numbered after the table store's."""
        more = numbers - len(self._slot_of)
        if more > 0:
            # In this order: an interrupt between them leaves room that is not known.
            self._count = np.append(self._count, np.zeros(more, np.uint32))
            self._slot_of = np.append(self._slot_of, np.full(more, EMPTY, np.int32))

    def forget(self, numbers: I64) -> None:
        """Empty the slots of these records, whose numbers will mean others."""
        slots = self._slot_of[numbers]
        self._slot_of[numbers], self._count[numbers] = EMPTY, 0
        self._record_of[slots[slots != EMPTY]] = EMPTY

    def missing(self, wanted: I64) -> I64:
        """The distinct records, ascending, that are in no slot."""
        distinct: I64 = np.unique(wanted)
        return np.asarray(distinct[self._slot_of[distinct] == EMPTY], np.int64)

    def slots_of(self, wanted: I64) -> npt.NDArray[np.int32]:
        """Slot of each record [T]; every one must be resident."""
        return self._slot_of[wanted]

    def use(self, wanted: I64) -> None:
        """Count one use of each record [T], before it is fetched."""
        resident = self._slot_of[wanted]
        hits = int((resident != EMPTY).sum())
        self.hits += hits
        self.misses += len(wanted) - hits
        if len(wanted) and self._count[wanted].max() > MOST_USES:
            self._count >>= 1
        np.add.at(self._count, wanted, 1)
        self._clock += 1
        self._last_use[resident[resident != EMPTY]] = self._clock
        self._age(len(wanted))

    def install(self, numbers: I64, records: Staged, keep: I64) -> None:
        """Put absent records [n, record_nbytes] of these numbers into slots; those of `keep` stay.

        The records as they are or as `storage.stage` gave them.
        """
        slots = self._victims(len(numbers), keep)
        evicted = self._record_of[slots]
        # An interrupt anywhere in here must leave no record that is looked for in a slot without
        # it; what it may leave is a slot whose record has moved, hence the second condition.
        stale = (evicted == EMPTY) | (self._slot_of[evicted] != slots)
        self._slot_of[evicted[~stale]] = EMPTY
        self._record_of[slots] = EMPTY
        self.storage.write(slots, records)
        self._record_of[slots] = numbers
        self._slot_of[numbers] = slots
        self._last_use[slots] = self._clock

    def _victims(self, count: int, keep: I64) -> npt.NDArray[np.intp]:
        """`count` slots: empty ones first, then the least and longest ago used."""
        if self.filled + count <= self.slots:
            self.filled += count
            return np.arange(self.filled - count, self.filled, dtype=np.intp)
        self.filled = self.slots
        held = self._record_of
        order = np.minimum(self._count[held], MOST_USES).astype(np.int64) << 32
        order += self._last_use
        order[held == EMPTY] = -1
        kept = self._slot_of[keep]
        order[kept[kept != EMPTY]] = np.iinfo(np.int64).max
        if count == 1:
            return np.array([order.argmin()], np.intp)
        return np.argpartition(order, count - 1)[:count]

    def _age(self, uses: int) -> None:
        self._uses_to_ageing -= uses
        if self._uses_to_ageing <= 0:
            self._count >>= 1
            self._uses_to_ageing = AGEING_USES_PER_SLOT * self.slots
