"""The row store with made records on top: what edits look up, composed when it is read.

Records of the table store keep their numbers; made records are numbered from there on. Only their
lookups are in memory: a read composes them from records of the store, checksums and all. A lookup
has one number, however many ask for it, and loses it when nobody needs it any more.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from stem_edge.numerics.quantize import I64, U8
from stem_edge.system.memory import own_pages
from stem_edge.tables.lookup import RowLookup, compose, token_of, tokens_of

if TYPE_CHECKING:
    from stem_edge.runtime.rows.host_tier import HostTier
    from stem_edge.runtime.rows.store import RowStore

READ_AT_ONCE = 32  # records of the table store, beside made ones: enough to keep flash busy


class EditedStore:
    """What the prefetcher reads. Stem ids are token ids, and from `tokens` on made records'."""

    def __init__(self, store: RowStore | HostTier) -> None:
        self.base, self.tokens, self.index = store, store.tokens, store.index
        self.layout = store.layout  # its `records` are those of the table store
        self.numbers = store.layout.records  # one more than the greatest number ever given
        self._lookups: dict[int, RowLookup] = {}  # number of a made record -> what it is made of
        self._numbers: dict[RowLookup, int] = {}
        self._users: Counter[int] = Counter()  # of each number
        self._free: list[int] = []  # numbers that can be given again
        # Generators may be closed by the garbage collector, at any place in any thread.
        self._released: deque[int] = deque()

    @property
    def made(self) -> int:
        """Made records that there are now."""
        return len(self._lookups)

    def records_of(self, stem_ids: I64) -> I64:
        """Numbers of the records [T] that stem ids [T] stand for."""
        if self.index is None:
            return stem_ids
        made = stem_ids >= self.tokens
        if not made.any():
            return self.index[stem_ids].astype(np.int64)
        own = self.index[np.where(made, 0, stem_ids)].astype(np.int64)
        return np.where(made, stem_ids - self.tokens + self.layout.records, own)

    def make(self, lookups: Iterable[RowLookup]) -> I64:
        """Stem ids of lookups: a token's own, or a made record's, in use until it is released."""
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
            # In this order: an interrupt loses a number, and no number is ever given twice.
            if self._free:
                number = self._free.pop()
            else:
                number = self.numbers
                self.numbers += 1
            self._lookups[number] = lookup
            self._numbers[lookup] = number
        self._users[number] += 1
        return number - self.layout.records + self.tokens

    def release(self, stem_ids: Sequence[int]) -> None:
        """Say that made records are not needed any more, once for each time they were asked for.

        Any thread may call it at any time: it only takes note.
        """
        self._released.extend(one for one in stem_ids if one >= self.tokens)

    def unused(self) -> I64:
        """Numbers that nobody needs any more, if any was released; they stay until forgotten."""
        if not self._released:
            return np.empty(0, np.int64)
        while self._released:
            self._users[self._released.popleft() - self.tokens + self.layout.records] -= 1
        return np.array([number for number, users in self._users.items() if users <= 0], np.int64)

    def forget(self, numbers: I64) -> None:
        """Numbers that may be given again: in no slot any more, and of no read under way."""
        for number in numbers.tolist():
            lookup = self._lookups.get(number)
            if lookup is not None and self._numbers.get(lookup) == number:
                del self._numbers[lookup]
            self._lookups.pop(number, None)
            self._users.pop(number, None)
            self._free.append(number)

    def read(self, numbers: I64) -> U8:
        """See RowStore.read; made records among them are composed."""
        made = np.flatnonzero(numbers >= self.layout.records)
        if not len(made):
            return self.base.read(numbers)
        records = own_pages((len(numbers), self.layout.record_nbytes), np.uint8)
        stored = np.flatnonzero(numbers < self.layout.records)
        for at in range(0, len(stored), READ_AT_ONCE):  # the memory plan counts one array of all
            piece = stored[at : at + READ_AT_ONCE]
            records[piece] = self.base.read(numbers[piece])
        for place in made.tolist():
            records[place] = self._compose(self._lookups[int(numbers[place])])
        return records

    def _compose(self, lookup: RowLookup) -> U8:
        tokens = tokens_of(lookup)
        wanted, place = np.unique(self.records_of(np.array(tokens, np.int64)), return_inverse=True)
        records = self.base.read(wanted) if tokens else np.empty((0, 0), np.uint8)
        of_token = {token: records[at] for token, at in zip(tokens, place.tolist(), strict=True)}
        return compose(self.layout, lookup, of_token)
