"""The row cache: keeps the most used table records in a fixed number of memory slots.

Use counts decay over time. The slots' memory is an input of the model's graph, and a step passes
slot numbers. Not thread-safe: only the engine's thread may use it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stem_edge.bundle.footprint import LEAST_BUCKETS
from stem_edge.numerics.quantize import I32, I64, U8
from stem_edge.runtime.rows.rows import EMPTY, NO_IDS
from stem_edge.runtime.rows.slots import Slots

# Counts are halved after this many uses per slot: often enough to follow a change of topic, rarely
# enough to remember frequent words. Chosen on real text with 512 to 8192 slots
# (docs/lab has such hit rates). So a count stays far below 32 bits.
AGEING_USES_PER_SLOT = 8
BUCKETS_PER_SLOT = 2


class Found(NamedTuple):
    """Result of a row cache lookup."""

    slots: I32  # [n], EMPTY where a record is in no slot
    missing: I64  # [n], distinct and ascending


class RowCache:
    """Maps record numbers to memory slots, in a hash table with chaining; evicts the least used.

    A record's bucket is its number modulo the number of buckets. Uses are counted by bucket.
    """

    def __init__(self, storage: Slots, slots: int | None = None) -> None:
        self.layout, self.storage, most = storage.layout, storage, storage.count
        self.slots = most if slots is None else slots  # number of slots that may be used now
        buckets = max(LEAST_BUCKETS, BUCKETS_PER_SLOT * most)
        self._buckets = min(buckets, self.layout.records)
        # The first slot of each bucket, then the slot that follows each slot in its bucket.
        self._links = np.full(self._buckets + most, EMPTY, np.int32)
        self._count = np.zeros(self._buckets, np.uint32)  # uses, halved at times
        # One element for each slot. The last one is for EMPTY (-1), so that it is a valid index.
        self._record_of = np.full(most + 1, EMPTY, np.int64)
        self._last_use = np.zeros(most + 1, np.int64)  # time of the last use; breaks ties
        self._clock = 0
        self.filled = 0  # slots used so far; unused ones are taken in order
        self._uses_to_ageing = AGEING_USES_PER_SLOT * self.slots
        self.hits = 0  # uses that needed no read of their own
        self.misses = 0  # records to read

    def find(self, records: I64) -> Found:
        """Look up record numbers [n]. EMPTY (-1) stands for no record."""
        slots, there = self._look_up(records)
        if there.all():
            return Found(slots, NO_IDS)
        # Not np.unique, whose first call takes 15 ms to import masked arrays.
        return Found(slots, np.array(sorted(set(records[~there].tolist())), np.int64))

    def _look_up(self, records: I64) -> tuple[I32, npt.NDArray[np.bool_]]:
        """Return each record's slot (EMPTY if not cached), and a mask of cached records."""
        slots = self._links[records % self._buckets]
        while True:
            there = self._record_of[slots] == records
            if there.all() or not (other := ~there & (slots != EMPTY)).any():
                return slots, there
            slots[other] = self._links[self._buckets + slots[other]]

    def use(self, records: I64, found: Found) -> None:
        """Count one use of each record [n], for evictions and hit rate. found: their lookup."""
        missing = found.missing.tolist()
        self.misses += (read := len(set(missing).intersection(records.tolist())) if missing else 0)
        self.hits += len(records) - read
        np.add.at(self._count, records % self._buckets, 1)
        self._clock += 1
        self._last_use[found.slots] = self._clock
        self._uses_to_ageing -= len(records)
        if self._uses_to_ageing <= 0:
            self._count >>= 1
            self._uses_to_ageing = AGEING_USES_PER_SLOT * self.slots

    def install(self, missing: I64, contents: U8, keep: I32) -> None:
        """Write uncached records into slots, without evicting the records in slots `keep`."""
        slots = self._victims(len(missing), keep)
        # An interrupt anywhere below must not leave a link to a slot with another record's rows.
        self._unlink(slots)
        self.storage.write(slots, contents)
        self._record_of[slots] = missing
        self._last_use[slots] = self._clock
        for slot, record in zip(slots.tolist(), missing.tolist(), strict=True):
            bucket = record % self._buckets
            self._links[self._buckets + slot] = self._links[bucket]
            self._links[bucket] = slot

    def _unlink(self, slots: npt.NDArray[np.integer]) -> None:
        links = self._links
        for slot, record in zip(slots.tolist(), self._record_of[slots].tolist(), strict=True):
            at = record % self._buckets
            while links[at] not in (slot, EMPTY):
                at = self._buckets + links[at]
            if links[at] == slot:
                links[at] = links[self._buckets + slot]
        self._record_of[slots] = EMPTY

    def _victims(self, count: int, keep: I32) -> npt.NDArray[np.intp]:
        """Choose slots to overwrite: empty ones, then least used, then least recently used."""
        if self.filled + count <= self.slots:
            self.filled += count
            return np.arange(self.filled - count, self.filled, dtype=np.intp)
        self.filled = self.slots
        # One key to sort by instead of two: the count, then the time of the last use below it.
        order = self._count[self._record_of % self._buckets].astype(np.int64) << 32
        order += self._last_use
        order[self._record_of == EMPTY] = -1
        order[keep] = order[self.slots :] = np.iinfo(np.int64).max
        if count == 1:
            return np.array([order.argmin()], np.intp)
        return np.argpartition(order, count - 1)[:count]
