"""Records in memory of the host, between flash and the slots of a device.

What a device's row cache lacks is looked for here before it is read from flash. This is a row cache
of its own, which sees only what the first one missed. So it ends up with other records than the
device, without either knowing of the other: a record that stays on the device is never asked for
here, loses its count as counts are halved, and makes room. What is pushed out of the device's slots
and comes back again and again is what stays.
"""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from stem_edge.numerics.quantize import I64, U8
from stem_edge.runtime.rows.cache import RowCache
from stem_edge.runtime.rows.edited_store import READ_AT_ONCE
from stem_edge.runtime.rows.slots import Slots
from stem_edge.runtime.rows.store import RowStore
from stem_edge.system.memory import own_pages
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.token_counts import Counts

# Of counts from before, next to what is seen here. Misses are fewer than uses, and old counts would
# outweigh them for long: with 1, up to 3 of 100 tokens more were read from flash in simulations.
EXPECTED_WEIGHT = 0.25


class RecordSlots(Slots):
    """Records as they are on flash, one in each slot; pages come as slots are filled."""

    def __init__(self, layout: RecordLayout, count: int) -> None:
        self.layout, self.count = layout, count
        self.records: U8 = own_pages((count, layout.record_nbytes), np.uint8)

    @property
    def slot_nbytes(self) -> int:
        """See Slots.slot_nbytes."""
        return self.layout.record_nbytes

    def write(self, slots: npt.NDArray[np.intp], records: U8) -> None:
        """See Slots.write."""
        self.records[slots] = records

    def copy(self, slots: npt.NDArray[np.int32]) -> U8:
        """Records [n, record_nbytes] of these slots [n]."""
        copied: U8 = own_pages((len(slots), self.layout.record_nbytes), np.uint8)
        # With "raise", the default, numpy would make another copy of all first.
        np.take(self.records, slots, axis=0, out=copied, mode="clip")
        return copied


class HostTier:
    """Reads from a store like one, and keeps up to `slots` records, at least 1, of what it read.

    Threads may read at once: they take turns, as one that reads alone is the rule.
    """

    def __init__(self, store: RowStore, slots: int) -> None:
        self.flash, self._turn = store, threading.Lock()
        self._kept = RecordSlots(store.layout, min(slots, store.layout.records))
        self._cache = RowCache(self._kept)
        self.slots = self._cache.slots  # records that there is room for
        self.layout, self.tokens, self.index = store.layout, store.tokens, store.index

    @property
    def hits(self) -> int:
        """Records that were found here, once for each read that wanted them."""
        return self._cache.hits

    @property
    def misses(self) -> int:
        """Records that were wanted and not here."""
        return self._cache.misses

    @property
    def bytes_read(self) -> int:
        """From flash, since opening."""
        return self.flash.bytes_read

    def read(self, numbers: I64) -> U8:
        """See RowStore.read. When it raises, what is kept here is still right."""
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

    def _read_some(self, numbers: I64, slots: npt.NDArray[np.int32]) -> U8:
        """Those that have a slot first: what comes from flash may push them out."""
        records = self._kept.copy(slots)
        missing = np.flatnonzero(slots < 0)
        for at in range(0, len(missing), READ_AT_ONCE):  # the memory plan counts one array of all
            piece = missing[at : at + READ_AT_ONCE]
            read = self.flash.read(numbers[piece])
            records[piece] = read
            self._keep(numbers[piece], read)
        return records

    def _keep(self, numbers: I64, records: U8) -> None:
        """As many of them as there are slots: the most used ones."""
        new, first = np.unique(numbers, return_index=True)
        if len(new) > self.slots:
            first = first[np.argsort(self._cache.counts[new], kind="stable")[-self.slots :]]
        if len(first) < len(numbers):  # else as they are, since choosing would copy them
            numbers, records = numbers[first], records[first]
        self._cache.install(numbers, records, numbers)

    def expect_counts(self, counts: Counts) -> I64:
        """Begin as if these uses had been seen here; the most used records, best first.

        `counts` are of uses that the device's cache will miss.
        """
        return self._cache.expect_counts(counts, EXPECTED_WEIGHT)

    def fill(self, numbers: I64) -> None:
        """Read records that are to be kept, without counting that as uses. Raises RowReadError."""
        with self._turn:
            missing = self._cache.missing(numbers)
            if len(missing):
                self._keep(missing, self.flash.read(missing))

    def close(self) -> None:
        """Close the store."""
        self.flash.close()
