"""The row cache: slots in memory that hold recent rows, evicted by aged LFU.

The slots are the backbone graph's inputs: an engine binds these arrays once, and a step passes only
slot numbers. All bookkeeping is numpy arrays over token ids and slots, so a prompt chunk is one
vectorised operation and the memory is exact: `slot_nbytes` for each slot.

Not thread-safe: only the thread that runs the engine may call it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stem_edge.quantize import F32, U8
from stem_edge.rows import Codes, RecordLayout
from stem_edge.token_counts import Counts

I64 = npt.NDArray[np.int64]

# Counts are halved after this many uses per slot: short enough to follow a change of topic, long
# enough to know the frequent words. Chosen on real text with 512 to 8192 slots (tools/simulate_cache.py).
AGEING_USES_PER_SLOT = 8
NO_TOKEN = -1


class RowCache:
    """Slots for the rows of `slots` tokens, all STEM layers each."""

    def __init__(self, layout: RecordLayout, slots: int) -> None:
        self.layout, self.slots = layout, slots
        layers = len(layout.layers)
        # One array a layer, because each is an input of the graph: [slots, codes_width].
        self.codes: list[Codes] = [
            np.zeros((slots, layout.codes_width), layout.codes_dtype) for _ in range(layers)
        ]
        self.scales: list[F32] = [
            np.zeros((slots, layout.groups), np.float32)
            for _ in range(layers if layout.quantized else 0)
        ]
        self._slot_of = np.full(layout.vocab_size, NO_TOKEN, np.int32)  # token -> slot
        self._token_of = np.full(slots, NO_TOKEN, np.int64)  # slot -> token
        self._count = np.zeros(layout.vocab_size, np.uint32)  # uses, halved now and then
        self._last_use = np.zeros(slots, np.int64)  # slot -> clock: breaks ties between counts
        self._clock = 0
        self._filled = 0  # slots that were ever used; they are taken in order
        self._uses_to_ageing = AGEING_USES_PER_SLOT * slots
        self.hits = 0  # tokens whose rows were in a slot when a step asked for them
        self.misses = 0

    @staticmethod
    def slot_nbytes(layout: RecordLayout) -> int:
        """Bytes of one slot: its rows, its zero points and its bookkeeping."""
        zero_points = -(-layout.groups * layout.bits // 8) if layout.quantized else 0
        return layout.record_nbytes + zero_points + 16

    @property
    def filled(self) -> int:
        """Slots that were ever used."""
        return self._filled

    @property
    def counts(self) -> Counts:
        """How often each token was used [V], halved now and then."""
        return self._count

    def expect_counts(self, counts: Counts) -> I64:
        """Begin as if text of these counts had been seen; the ids that it uses most, best first.

        They weigh as much as all uses between two halvings, so that new text soon outweighs them.
        """
        total = int(counts.sum(dtype=np.uint64))
        if not total:
            return np.zeros(0, np.int64)
        scale = AGEING_USES_PER_SLOT * self.slots / total
        self._count[:] = counts * scale
        used = np.flatnonzero(counts)
        best = used[np.argsort(counts[used], kind="stable")[::-1]]
        return np.asarray(best[: self.slots], np.int64)

    def missing(self, token_ids: I64) -> I64:
        """The distinct ids, ascending, whose rows are in no slot."""
        distinct: I64 = np.unique(token_ids)
        return np.asarray(distinct[self._slot_of[distinct] == NO_TOKEN], np.int64)

    def slots_of(self, token_ids: I64) -> npt.NDArray[np.int32]:
        """Slot of each id [T]; every id must be resident."""
        return self._slot_of[token_ids]

    def use(self, token_ids: I64) -> None:
        """Count one use of each id [T], before its rows are fetched."""
        resident = self._slot_of[token_ids]
        hits = int((resident != NO_TOKEN).sum())
        self.hits += hits
        self.misses += len(token_ids) - hits
        np.add.at(self._count, token_ids, 1)
        self._clock += 1
        self._last_use[resident[resident != NO_TOKEN]] = self._clock
        self._age(len(token_ids))

    def install(self, token_ids: I64, records: U8, keep: I64) -> None:
        """Put the records [n, record_nbytes] of absent ids into slots; those of `keep` stay."""
        slots = self._victims(len(token_ids), keep)
        evicted = self._token_of[slots]
        # An interrupt anywhere in here must leave no token that finds its rows in a slot without
        # them; what it may leave is a slot whose token has moved, hence the second condition.
        stale = (evicted == NO_TOKEN) | (self._slot_of[evicted] != slots)
        self._slot_of[evicted[~stale]] = NO_TOKEN
        self._token_of[slots] = NO_TOKEN
        for index, codes in enumerate(self.codes):
            codes[slots] = self.layout.codes(records, index)
            if self.scales:
                self.scales[index][slots] = self.layout.scales(records, index)
        self._token_of[slots] = token_ids
        self._slot_of[token_ids] = slots
        self._last_use[slots] = self._clock

    def _victims(self, count: int, keep: I64) -> npt.NDArray[np.intp]:
        """`count` slots: empty ones first, then the least and longest ago used."""
        if self._filled + count <= self.slots:
            self._filled += count
            return np.arange(self._filled - count, self._filled, dtype=np.intp)
        self._filled = self.slots
        tokens = self._token_of
        order = self._count[tokens].astype(np.int64) << 32
        order += self._last_use
        order[tokens == NO_TOKEN] = -1
        kept = self._slot_of[keep]
        order[kept[kept != NO_TOKEN]] = np.iinfo(np.int64).max
        if count == 1:
            return np.array([order.argmin()], np.intp)
        return np.argpartition(order, count - 1)[:count]

    def _age(self, uses: int) -> None:
        self._uses_to_ageing -= uses
        if self._uses_to_ageing <= 0:
            self._count >>= 1
            self._uses_to_ageing = AGEING_USES_PER_SLOT * self.slots
