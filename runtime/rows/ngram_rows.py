"""Rows of n-grams for a server of a large backbone: from ids to gathered vectors.

    ids -> keys (numerics/ngram_hash.py) -> pages of the table store -> rows -> float32 [T, heads * width]

Which rows a step needs is known from ids alone, so `prefetch` asks the system for them as soon as the
ids are known, and `rows` finds them in memory. Nothing is kept here: what is used often stays in the
system's page cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from stem_edge.errors import InputError
from stem_edge.numerics.quantize import F32, I64, U8
from stem_edge.runtime.rows.rows import RowCounters
from stem_edge.runtime.rows.store import RowStore, open_shards
from stem_edge.tables.ngrams.rows import NgramTable
from stem_edge.tables.ngrams.store import open_ngrams

# Pages that are read together: 8 MB of memory, and more than keeps a drive busy.
PAGES_AT_ONCE = 2048


class NgramRows:
    """Tables of n-grams of one model, opened for reading. Threads may read at once.

    A context manager; closing releases files. Raises BundleError.
    """

    def __init__(self, path: str | Path, url: str | None = None) -> None:
        store = open_ngrams(Path(path))
        self.tables, self._class_of = store.format.tables, store.class_of
        with ExitStack() as opened:
            self._stores = [
                opened.enter_context(RowStore(pages, open_shards(pages, url)))
                for pages in store.tables
            ]
            self._opened = opened.pop_all()

    @property
    def memory(self) -> int:
        """Last ids of a text that its next position needs as `before`."""
        return max(table.hash.memory for table in self.tables)

    def keys(self, ids: npt.ArrayLike, before: npt.ArrayLike = (), table: int | str = 0) -> I64:
        """Return the row number of each head at each position, int64 [T, heads]. Raises InputError."""
        return self._table(table)[0].hash.keys(ids, before, self._class_of)

    def prefetch(self, ids: npt.ArrayLike, before: npt.ArrayLike = ()) -> None:
        """Let the system begin to read what `rows` will want for these ids; returns at once."""
        for table, store in zip(self.tables, self._stores, strict=True):
            keys = table.hash.keys(ids, before, self._class_of)
            pages = np.unique(keys // table.rows_per_page)
            store.ahead(pages, np.ones(len(pages), np.bool_))

    def rows(self, ids: npt.ArrayLike, before: npt.ArrayLike = (), table: int | str = 0) -> F32:
        """Return the rows of all heads at each position, one after another, [T, heads * width].

        ids: of a text [T]. before: ids of the text before these, at least the last `memory` of them.
        table: its number or name. Raises InputError, RowReadError.
        """
        described, store = self._table(table)
        keys = described.hash.keys(ids, before, self._class_of)
        values = np.empty((keys.size, described.width), np.float32)
        for places, stored in _gathered(described, store, keys.reshape(-1)):
            values[places] = described.values(stored)
        return values.reshape(len(keys), described.hash.heads * described.width)

    def counters(self) -> RowCounters:
        """Return the bytes that were read since opening."""
        return sum((store.counters() for store in self._stores), RowCounters())

    def close(self) -> None:
        """Release the files; later reads fail."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _table(self, table: int | str) -> tuple[NgramTable, RowStore]:
        names = [described.name for described in self.tables]
        number = names.index(table) if table in names else table
        if not isinstance(number, int) or not 0 <= number < len(names):
            raise InputError(
                f"no table {table!r}; expected 0 to {len(names) - 1}, or {', '.join(names)}"
            )
        return self.tables[number], self._stores[number]


def _gathered(table: NgramTable, store: RowStore, keys: I64) -> Iterator[tuple[I64, U8]]:
    """Read the pages of rows, some at a time; yield places in `keys` and their rows [n, row_nbytes]."""
    order = np.argsort(keys, kind="stable")
    numbers = keys[order] // table.rows_per_page
    first = np.flatnonzero(np.diff(numbers, prepend=-1))  # of each page's rows in this order
    for at in range(0, len(first), PAGES_AT_ONCE):
        begins = first[at : at + PAGES_AT_ONCE]
        end = first[at + PAGES_AT_ONCE] if at + PAGES_AT_ONCE < len(first) else len(order)
        pages = store.read(numbers[begins])[:, : table.rows_per_page * table.row_nbytes]
        places = order[begins[0] : end]
        page = np.searchsorted(begins, np.arange(begins[0], end), "right") - 1
        rows = pages.reshape(len(begins), table.rows_per_page, table.row_nbytes)
        yield places, rows[page, keys[places] % table.rows_per_page]


def open_rows(path: str | Path, *, url: str | None = None) -> NgramRows:
    """Open tables of n-grams that `stem-edge export --tables-only` wrote. Raises BundleError.

        with stem_edge.open_rows("rows") as rows:
            rows.prefetch(ids)
            vectors = rows.rows(ids)  # float32 [T, heads * width]

    url: where the shards are, if the folder has descriptions alone, for fsspec; nothing is prefetched then.
    """
    return NgramRows(path, url)
