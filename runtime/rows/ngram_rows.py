"""Reads rows of n-gram tables for other inference engines: token ids in, float32 vectors out.

Each hash head maps the last token ids to one row. Files contain pages of many rows. The OS's page
cache is the only cache: `prefetch` asks the OS to read rows as soon as token ids are known.
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
    """The n-gram tables of one model, opened for reading. Threads may read concurrently.

    A context manager; closing releases files. Raises BundleError.
    """

    def __init__(self, path: str | Path, url: str | None) -> None:
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
        """Number of earlier token ids that determine a token's rows, together with its own id."""
        return max(table.hash.memory for table in self.tables)

    def keys(self, ids: npt.ArrayLike, before: npt.ArrayLike = (), table: int | str = 0) -> I64:
        """Return the row numbers that `rows` reads for these arguments, with the same errors: int64 [T, heads]."""
        return self._table(table)[0].hash.keys(ids, before, self._class_of)

    def prefetch(self, ids: npt.ArrayLike, before: npt.ArrayLike = ()) -> None:
        """Ask the OS to start reading the rows of these ids; return at once. before: see `rows`."""
        for table, store in zip(self.tables, self._stores, strict=True):
            keys = table.hash.keys(ids, before, self._class_of)
            store.ahead(np.unique(keys // table.rows_per_page))

    def rows(self, ids: npt.ArrayLike, before: npt.ArrayLike = (), table: int | str = 0) -> F32:
        """Return the rows that each token looks up, concatenated: [T, heads * width].

        Each of a table's hash functions (heads) maps the last token ids to one row.

        ids: token ids [T].
        before: the ids that precede them in the text, at least the last NgramRows.memory of them.
        table: number or name.

        Raises InputError for an unknown table or bad ids, RowReadError for a failed read.
        """
        described, store = self._table(table)
        keys = described.hash.keys(ids, before, self._class_of)
        values = np.empty((keys.size, described.width), np.float32)
        for places, stored in _gathered(described, store, keys.reshape(-1)):
            values[places] = described.values(stored)
        return values.reshape(len(keys), described.hash.heads * described.width)

    def counters(self) -> RowCounters:
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
    """Read rows by number, in batches; yield indices [n] into `keys`, and rows [n, row_nbytes]."""
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
    """Open n-gram tables that `stem-edge export --tables-only` wrote. Raises BundleError.

        with stem_edge.open_rows("rows") as rows:
            rows.prefetch(ids)
            vectors = rows.rows(ids)  # float32 [T, heads * width]: a row per hash head

    url: where fsspec finds the shards if they are not in the folder. `prefetch` then does nothing.
    """
    return NgramRows(path, url)
