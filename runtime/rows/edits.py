"""Adds edited rows to a table store: each read composes an edit record from stored records."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

import numpy as np

from stem_edge.numerics.quantize import I64, U8
from stem_edge.runtime.rows.rows import READ_AT_ONCE
from stem_edge.runtime.rows.store import RowStore
from stem_edge.system.memory import pages_to_fill
from stem_edge.tables.composing import compose, token_of, tokens_of
from stem_edge.tables.rows import RowLookup


class EditedStore:
    """A table store with added records, which edits combine from its rows; see RowStore.

    Row ids of added records begin at the attribute `tokens`. Equal edits share a record until all
    users release it. The number of a record is never assigned again.
    """

    def __init__(self, store: RowStore) -> None:
        self.base, self.tokens = store, store.tokens
        self.distant = store.distant
        self.counters, self.close = store.counters, store.close
        self.layout = store.layout  # its `records` does not count edit records
        self.numbers = store.layout.records  # one more than the greatest number ever assigned
        self._lookups: dict[int, RowLookup] = {}  # number of an edit record -> its lookup
        self._numbers: dict[RowLookup, int] = {}
        self._users: Counter[int] = Counter()  # number of an edit record -> its users
        # A deque, because the garbage collector may close a generator at any point of any thread.
        self._released: deque[int] = deque()

    @property
    def made(self) -> int:
        return len(self._lookups)

    def records_of(self, row_ids: I64) -> I64:
        made = row_ids >= self.tokens
        own = self.base.records_of(np.where(made, 0, row_ids))
        return np.where(made, row_ids - self.tokens + self.layout.records, own)

    def make(self, lookups: Iterable[RowLookup]) -> I64:
        """Return a row id for each lookup: a token id if that has the same row, else a new id."""
        made: list[int] = []
        try:
            made.extend(map(self._make, lookups))
            return np.array(made, np.int64)
        except BaseException:
            self.release(made)
            raise

    def _make(self, lookup: RowLookup) -> int:
        token = token_of(lookup)
        if token is not None:
            return token
        number = self._numbers.get(lookup)
        if number is None:
            number = self.numbers
            self.numbers += 1  # first: an interrupt can lose a number but never assign it twice
            self._lookups[number] = lookup
            self._numbers[lookup] = number
        self._users[number] += 1
        return number - self.layout.records + self.tokens

    def release(self, row_ids: Sequence[int]) -> None:
        """Queue row ids from `make` for release, one for each use. Any thread may call it."""
        self._released.extend(row_id for row_id in row_ids if row_id >= self.tokens)

    def forget_unused(self) -> None:
        """Delete added records that no running call uses any more. A concurrent read of them fails.

        Can be interrupted at any point. Their row cache slots are reused once they are the least used.
        """
        while self._released:
            self._users[self._released.popleft() - self.tokens + self.layout.records] -= 1
        for number in [number for number, users in self._users.items() if users <= 0]:
            lookup = self._lookups.get(number)
            if lookup is not None and self._numbers.get(lookup) == number:
                del self._numbers[lookup]
            self._lookups.pop(number, None)
            self._users.pop(number, None)

    def read(self, numbers: I64) -> U8:
        stored = np.flatnonzero(numbers < self.layout.records)
        if len(stored) == len(numbers):
            return self.base.read(numbers)
        records = pages_to_fill((len(numbers), self.layout.record_nbytes))
        for at in range(0, len(stored), READ_AT_ONCE):
            piece = stored[at : at + READ_AT_ONCE]
            records[piece] = self.base.read(numbers[piece])
        for place in np.flatnonzero(numbers >= self.layout.records).tolist():
            records[place] = self._compose(self._lookups[int(numbers[place])])
        return records

    def _compose(self, lookup: RowLookup) -> U8:
        tokens = tokens_of(lookup)
        sources = self.base.records_of(np.array(tokens, np.int64))
        wanted, place = np.unique(sources, return_inverse=True)
        records = self.base.read(wanted)
        of_token = {token: records[at] for token, at in zip(tokens, place.tolist(), strict=True)}
        return compose(self.layout, lookup, of_token)

    def ahead(self, numbers: I64) -> None:
        self.base.ahead(numbers[numbers < self.layout.records])
