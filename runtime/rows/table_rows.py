"""Fills row cache slots with records from the table store, and prefetches the next step's records.

`TableRows.expect` lets a thread read the next step's records. `TableRows.slots` waits for this
read, and repeats it if it failed, except over a network. Only `slots` changes the cache, between
computations, so the graph never reads a slot that is being written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from stem_edge.errors import InputError, RowReadError
from stem_edge.numerics.quantize import I32, I64, U8
from stem_edge.runtime.rows.cache import Found, RowCache
from stem_edge.runtime.rows.rows import ANY_NUMBER, NO_IDS, EditRow, RowCounters, RowKeys, Rows
from stem_edge.runtime.rows.store import RowStore
from stem_edge.tables.rows import RowLookup

if TYPE_CHECKING:
    from stem_edge.runtime.rows.edits import EditedStore

T = TypeVar("T")
# Tokens to hint to the system ahead of the next step. 0 and unlimited both doubled stalls.
AHEAD_TOKENS = 256
# After this time, a step reads by itself: a thread that ran out of memory can end without an error.
PATIENCE_SECONDS = 60.0


class TableRows(Rows):
    """The rows of a model with tables. Not thread-safe. `close` closes the store.

    overlap: if True, `expect` reads the next step's rows in a thread; if False, it does nothing.
    """

    def __init__(
        self, store: RowStore, cache: RowCache, *, overlap: bool = True, keys: RowKeys | None = None
    ) -> None:
        super().__init__(keys)
        self.store: RowStore | EditedStore = store
        self._tables, self.cache = store, cache
        self._edits: EditedStore | None = None  # over the tables, once there are edits
        self._stall_seconds = 0.0
        self._pool = _one_thread() if overlap else None
        self._reading: tuple[I64, Future[U8]] | None = None

    @property
    def step_tokens(self) -> int:
        return min(self._keys.step_tokens, self._fitting(self._keys.rows_before))

    @property
    def step_sequences(self) -> int:
        each = self._keys.rows_per_token + self._keys.rows_before
        return max(1, self._fitting() * self._keys.rows_per_token // each)

    @property
    def made(self) -> int:
        return 0 if self._edits is None else self._edits.made

    def _fitting(self, rows_before: int = 0) -> int:
        """Return how many tokens' rows fit in the row cache if `rows_before` rows are in it."""
        if self.cache.slots >= self.store.layout.records + self.made:
            return ANY_NUMBER
        return (self.cache.slots - rows_before) // self._keys.rows_per_token

    def expect(self, row_ids: I64, later: I64 = NO_IDS) -> None:
        if self._pool is None or self._reading is not None:
            return
        missing = self.cache.find(self.store.records_of(row_ids).ravel()).missing
        with suppress(RuntimeError, MemoryError):  # no threads left, or the interpreter is ending
            if len(missing):
                self._reading = missing, self._pool.submit(self.store.read, missing)
            if len(later):
                # Hinting is a separate call after the read, because hints take long on slow flash.
                records = self.store.records_of(self._new(later[:AHEAD_TOKENS]))
                self._pool.submit(self.store.ahead, self.cache.find(records).missing)

    def slots(self, row_ids: I64) -> I32:
        """Read uncached rows; return the row cache slots of all rows, in the shape of row_ids.

        Each distinct record needs a slot. Can be repeated after RowReadError or MemoryError.
        """
        records = self.store.records_of(row_ids)
        found = self.cache.find(records.ravel())
        self.cache.use(self._new(records), found)
        if (reading := self._reading) is not None and self._install_expected(*reading, found):
            found = self.cache.find(records.ravel())
        if len(missing := found.missing):
            read = self._timed(partial(self.store.read, missing))
            self.cache.install(missing, read, found.slots)
            found = self.cache.find(records.ravel())
        return found.slots.reshape(row_ids.shape)

    def _new(self, keys: I64) -> I64:
        """Return the tokens' own row ids, flat: without rows of earlier tokens (first columns)."""
        return keys if keys.ndim == 1 else keys[:, -self._keys.rows_per_token :].ravel()

    def _install_expected(self, read: I64, call: Future[U8], found: Found) -> bool:
        """Wait for the records `read` that `expect` asked for; cache those that the step lacks. False if there are none.

        found: the step's lookup. call: the read that is under way.
        """
        self._timed(partial(wait, [call], PATIENCE_SECONDS))
        self._reading = None
        if not call.done():
            self._pool = _one_thread()
        error = call.exception() if call.done() else TimeoutError()
        # Other records, such as those of an answer that was abandoned, could evict records that this step needs.
        missing = set(found.missing.tolist())
        wanted = np.array([number in missing for number in read.tolist()])
        if error is None and wanted.any():
            records = call.result()
            if not wanted.all():
                read, records = read[wanted], records[wanted]
            self.cache.install(read, records, found.slots)
            return True
        if self.store.distant and wanted.all() and isinstance(error, RowReadError):
            raise error  # over a network, the store has already tried twice
        return False

    def make(self, lookups: Sequence[RowLookup]) -> list[EditRow]:
        if lookups and not self._keys.editable:
            raise InputError(
                "rows of this model belong to n-grams, and edits say which rows tokens look up; load it "
                "without edits"
            )
        if (edits := self._edits) is None:
            if not lookups:
                return []
            from stem_edge.runtime.rows.edits import EditedStore  # only for edits

            self.store = edits = self._edits = EditedStore(self._tables)
        return list(map(edits.make, lookups))

    def counters(self) -> RowCounters:
        return self.store.counters() + RowCounters(
            hits=self.cache.hits,
            misses=self.cache.misses,
            stall_seconds=self._stall_seconds,
        )

    def _timed(self, wait: Callable[[], T]) -> T:
        started = time.perf_counter()
        try:
            return wait()
        finally:
            self._stall_seconds += time.perf_counter() - started

    def close(self) -> None:
        if self.store.distant:  # first, so that running reads end soon
            self.store.close()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._reading = None
        self.store.close()


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "stem-edge-prefetch")
