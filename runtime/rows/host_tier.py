"""The host tier: records in host memory, between flash and the slots of a device.

Records that a device's row cache lacks are looked up here before they are read from flash. The tier
is a second row cache that sees only the misses of the first. So the two come to hold different
records without knowing of each other: a record that stays on the device is never asked for here,
loses its count as counts are halved, and is evicted. Records stay if the device evicts them and
needs them again and again.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from stem_edge.numerics.quantize import I64, U8
from stem_edge.runtime.rows.cache import RowCache
from stem_edge.runtime.rows.records import READ_AT_ONCE, Flags, Records, RowCounters
from stem_edge.runtime.rows.slots import Slots
from stem_edge.system.memory import own_pages, pages_to_fill
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.token_counts import Counts

# Weight of expected counts. It must be below 1 because misses are fewer than uses, and the expected
# counts would outweigh them for long: with 1, simulations read up to 3 % more tokens from flash.
EXPECTED_WEIGHT = 0.25


class RecordSlots(Slots):
    """Slots that hold records as they are on flash; memory is touched as slots are filled."""

    def __init__(self, layout: RecordLayout, count: int) -> None:
        self.layout, self.count = layout, count
        self.records: U8 = own_pages((count, layout.record_nbytes), np.uint8)

    @property
    def slot_nbytes(self) -> int:
        return self.layout.record_nbytes

    def write(self, slots: npt.NDArray[np.intp], records: U8) -> None:
        self.records[slots] = records

    def copy(self, slots: npt.NDArray[np.int32]) -> U8:
        """Records [n, record_nbytes] of these slots [n]."""
        copied: U8 = pages_to_fill((len(slots), self.layout.record_nbytes))
        # mode="clip", because the default "raise" makes numpy buffer a second copy.
        np.take(self.records, slots, axis=0, out=copied, mode="clip")
        return copied


class HostTier(Records):
    """A row store over another that keeps up to `slots` (at least 1) of the records it has read.

    Threads may call it at once and take turns; usually only one reads.
    """

    def __init__(self, store: Records, slots: int) -> None:
        self.flash, self._turn = store, threading.Lock()
        self.splits = False  # because it keeps whole records
        self.distant = store.distant
        self._kept = RecordSlots(store.layout, min(slots, store.layout.records))
        self._cache = RowCache(self._kept)
        self.slots = self._cache.slots  # records that it has room for
        self.layout, self.tokens, self.index = store.layout, store.tokens, store.index

    def counters(self) -> RowCounters:
        own = RowCounters(host_hits=self._cache.hits, host_misses=self._cache.misses)
        return self.flash.counters() + own

    def read(self, numbers: I64, whole: Flags | None = None) -> U8:
        """Read as RowStore.read does, but always whole records.

        When it raises, the records kept here are still right.
        """
        with self._turn:
            self._cache.use(numbers)
            slots = self._cache.slots_of(numbers)
            if (slots >= 0).all():
                return self._kept.copy(slots)
            if (slots < 0).all():
                records = self.flash.read(numbers)
                self._keep(numbers, records)
                return records
            return self._read_some(numbers, slots)

    def ahead(self, numbers: I64, whole: Flags) -> None:
        with self._turn:
            missing = self._cache.missing(numbers)
        self.flash.ahead(missing, np.ones(len(missing), np.bool_))

    def _read_some(self, numbers: I64, slots: npt.NDArray[np.int32]) -> U8:
        """Copy the records that have a slot first, because those read from flash may evict them."""
        records = self._kept.copy(slots)
        missing = np.flatnonzero(slots < 0)
        for at in range(0, len(missing), READ_AT_ONCE):
            piece = missing[at : at + READ_AT_ONCE]
            read = self.flash.read(numbers[piece])
            records[piece] = read
            self._keep(numbers[piece], read)
        return records

    def _keep(self, numbers: I64, records: U8) -> None:
        """Keep as many records as there are slots, the most used ones."""
        new, first = np.unique(numbers, return_index=True)
        if len(new) > self.slots:
            first = first[np.argsort(self._cache.counts[new], kind="stable")[-self.slots :]]
        if len(first) < len(numbers):  # otherwise as they are, since choosing copies
            numbers, records = numbers[first], records[first]
        self._cache.install(numbers, records, numbers)

    def expect_counts(self, counts: Counts) -> I64:
        """Start as if these uses, misses of the device's cache, had been seen here.

        Returns the most used records, best first.
        """
        return self._cache.expect_counts(counts, EXPECTED_WEIGHT)

    def fill(self, numbers: I64) -> None:
        """Read and keep records without counting uses. Raises RowReadError."""
        with self._turn:
            missing = self._cache.missing(numbers)
            if len(missing):
                self._keep(missing, self.flash.read(missing))

    def stop(self) -> None:
        self.flash.stop()

    def close(self) -> None:
        self.flash.close()
