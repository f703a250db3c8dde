"""Adds edited rows to a table store: each read composes an edit record from stored records."""

from __future__ import annotations

from itertools import count
from weakref import WeakValueDictionary

import numpy as np

from stem_edge.numerics.quantize import I64, U8
from stem_edge.runtime.rows.rows import READ_AT_ONCE, EditRow
from stem_edge.runtime.rows.store import RowStore
from stem_edge.tables.composing import compose, token_of, tokens_of
from stem_edge.tables.rows import RowLookup


class EditedStore:
    """A table store with added records, which edits combine from its rows; see RowStore.

    Row ids of added records begin at the attribute `tokens`. Equal edits share a record. An added record
    disappears with its EditRow; its row cache slot is reused once it is the least used. A row id is never
    assigned again.
    """

    def __init__(self, store: RowStore) -> None:
        self.base, self.tokens = store, store.tokens
        self.distant = store.distant
        self.counters, self.close = store.counters, store.close
        self.layout = store.layout  # its `records` does not count edit records
        self._row_ids = count(self.tokens)  # an interrupt can lose an id but never assign it twice
        self._rows = WeakValueDictionary[int, EditRow]()  # row id -> row
        self._of_lookup = WeakValueDictionary[RowLookup, EditRow]()

    @property
    def made(self) -> int:
        return len(self._rows)

    def records_of(self, row_ids: I64) -> I64:
        made = row_ids >= self.tokens
        own = self.base.records_of(np.where(made, 0, row_ids))
        return np.where(made, row_ids - self.tokens + self.layout.records, own)

    def make(self, lookup: RowLookup) -> EditRow:
        """Return the row of a lookup. Its id is a token id if that token has the same row, else a new id."""
        if (row := self._of_lookup.get(lookup)) is not None:
            return row
        token = token_of(lookup)
        row = EditRow(lookup, next(self._row_ids) if token is None else token)
        if token is None:
            self._rows[row.row_id] = self._of_lookup[lookup] = row
        return row

    def read(self, numbers: I64) -> U8:
        stored = np.flatnonzero(numbers < self.layout.records)
        if len(stored) == len(numbers):
            return self.base.read(numbers)
        records = np.empty((len(numbers), self.layout.record_nbytes), np.uint8)
        for at in range(0, len(stored), READ_AT_ONCE):
            piece = stored[at : at + READ_AT_ONCE]
            records[piece] = self.base.read(numbers[piece])
        for place in np.flatnonzero(numbers >= self.layout.records).tolist():
            row_id = int(numbers[place]) - self.layout.records + self.tokens
            records[place] = self._compose(self._rows[row_id].lookup)
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
