"""The prefetcher: brings rows into the cache, ahead of need where the ids are known in advance.

`submit(ids)` starts a thread that reads what the cache lacks. `fetch(ids)` returns the slots of all
ids: it waits for that read, and itself reads what was not submitted. Only `fetch` changes the cache,
in the caller's thread and between two computations, so the graph never reads a slot that is being
written. At most one read is under way, and no record is read twice for a step unless the thread
fails: then `fetch` reads again, except over a network, and reports what still fails.

The thread also converts records to the form of the slots. Row ids become record numbers here: engine
and backend know tokens and slots, cache and store know records.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from stem_edge.errors import InputError, RowReadError
from stem_edge.numerics.quantize import I64
from stem_edge.runtime.rows.cache import EMPTY, RowCache, needed_whole
from stem_edge.runtime.rows.records import Flags, Records, RowCounters, RowKeys, records_of
from stem_edge.runtime.rows.slots import Staged
from stem_edge.tables.rows import RowLookup

if TYPE_CHECKING:
    from stem_edge.runtime.rows.edited_store import EditedStore

T = TypeVar("T")
# A waiting caller checks this often that the thread is alive, because one that dies says nothing.
POLL_SECONDS = 0.5
# Tokens beyond the next step whose records are begun; with none, or all, steps wait twice as long.
AHEAD_TOKENS = 256
ANY_NUMBER = 1 << 30  # of tokens in a step: no limit


class Background:
    """Runs calls one after the other in a thread, which the first call starts.

    Only one thread may use it. If its own cannot start or has died, that is no error: the call has
    no result, and the next call gets a new thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._renew()

    def _renew(self) -> None:
        started = self._started = list[threading.Thread]()
        self._pool = ThreadPoolExecutor(
            1, self._name, initializer=lambda: started.append(threading.current_thread())
        )

    def start(self, call: Callable[[], T]) -> Future[T] | None:
        """Start a call; return None if no thread can take it."""
        try:
            return self._pool.submit(call)
        except (RuntimeError, MemoryError):  # no threads left, or the interpreter is ending
            self.close()  # cancels the call if it was queued, since its result is not asked for
            self._renew()
            return None

    def result(self, call: Future[T]) -> T | None:
        """Wait for a call and return its result; None if it raised."""
        while True:
            try:
                return call.result() if call.exception(POLL_SECONDS) is None else None
            except TimeoutError:
                # A thread that runs out of memory can die without completing its call.
                if self._started and not self._started[0].is_alive() and not call.done():
                    self._renew()
                    return None
            except CancelledError:
                return None

    def close(self) -> None:
        """Wait for the call under way and end the thread."""
        self._pool.shutdown(cancel_futures=True)


NO_IDS: I64 = np.zeros(0, np.int64)


class Reading(NamedTuple):
    """Records to read."""

    numbers: I64  # [n]
    whole: Flags  # [n], False where the rows that prompts need are enough


class Rows:
    """Source of slots for an engine. This base class serves dense models, which have no rows."""

    keys = RowKeys()

    @property
    def step_tokens(self) -> int:
        """Most tokens that a step may have, whichever they are."""
        return ANY_NUMBER

    def submit(self, row_ids: I64, whole: int | None = None, later: I64 = NO_IDS) -> None:
        """Start reading the records of these ids that are in no slot; whole as in `fetch`.

        later: ids of a prompt that follow, whose records the system may begin to read.
        """

    def fetch(self, row_ids: I64, whole: int | None = None) -> npt.NDArray[np.int32]:
        """Slots int32 of row ids [T], or [T, ...] by `keys`, all resident until the next call.

        whole: of how many of the last ids all rows are needed, not only those that every token of
        a prompt needs (ModelConfig.prompt_rows). Default: of all.
        """
        return np.zeros(len(row_ids), np.int32)

    def make(self, lookups: Sequence[RowLookup]) -> I64:
        """Row ids int64 [n] that stand for lookups [n] until released. Raises InputError."""
        if lookups:
            raise InputError("this model is dense: it has no rows to edit; load one with tables")
        return np.zeros(0, np.int64)

    def release(self, row_ids: Sequence[int]) -> None:
        """Give back row ids from `make`; safe in any thread."""

    def counters(self) -> RowCounters:
        """Return the counts so far."""
        return RowCounters()

    def close(self) -> None:
        """Release threads and files."""


class Prefetcher(Rows):
    """Source of slots for a model with tables. Without `overlap`, submit does nothing.

    Only the caller that has the engine's turn may use it, except for `release`.
    """

    def __init__(
        self, store: Records, cache: RowCache, *, overlap: bool = True, keys: RowKeys | None = None
    ) -> None:
        self.store, self.cache, self.keys = store, cache, keys or RowKeys()
        self.edited: EditedStore | None = None  # over `store`, once there are edits
        self.stall_seconds, self._splits = 0.0, store.splits
        self._background = Background("stem-edge-prefetch") if overlap else None
        self._pending: tuple[Reading, Future[Staged]] | None = None

    @property
    def step_tokens(self) -> int:
        # With a slot for every record, any tokens fit.
        everything = self.store.layout.records + self.made
        most, keys = self.cache.slots, self.keys
        fitting = (most - keys.others) // keys.each
        return min(keys.most, fitting if most < everything else ANY_NUMBER)

    @property
    def made(self) -> int:
        """Count of records made by edits at present."""
        return 0 if self.edited is None else self.edited.made

    def counters(self) -> RowCounters:
        return self.store.counters() + RowCounters(
            hits=self.cache.hits,
            misses=self.cache.misses,
            stall_seconds=self.stall_seconds,
            uploaded_rows=self.cache.storage.uploaded_rows,
            uploaded_bytes=self.cache.storage.uploaded_nbytes,
        )

    def make(self, lookups: Sequence[RowLookup]) -> I64:
        """Make row ids as Rows.make does, and free the records released since the last call."""
        if lookups and not self.keys.made:
            raise InputError(
                "rows of this model belong to n-grams, and edits say which rows tokens look up; load it "
                "without edits"
            )
        if (edited := self.edited) is None:
            if not lookups:
                return np.zeros(0, np.int64)
            from stem_edge.runtime.rows.edited_store import EditedStore  # for edits alone

            edited = self.edited = EditedStore(self.store)
        made = edited.make(lookups)
        try:
            self.cache.make_room(edited.numbers)
            self._forget_unused(edited)
        except BaseException:
            edited.release(made.tolist())
            raise
        return made

    def release(self, row_ids: Sequence[int]) -> None:
        if self.edited is not None:
            self.edited.release(row_ids)

    def _records_of(self, row_ids: I64) -> I64:
        if self.edited is not None:
            return self.edited.records_of(row_ids)
        return records_of(self.store, row_ids)

    def submit(self, row_ids: I64, whole: int | None = None, later: I64 = NO_IDS) -> None:
        if self._background is None or self._pending is not None:
            return
        whole = whole if self._splits else None
        reading = self._missing(self._records_of(row_ids), whole)
        if len(reading.numbers):
            started = self._background.start(partial(self._read, reading))
            self._pending = None if started is None else (reading, started)
        if len(later):
            # After that read, and apart from it, because asking takes long where flash is slow.
            wanted = self._missing(self._records_of(later), 0 if self._splits else None)
            self._background.start(partial((self.edited or self.store).ahead, *wanted))

    def _missing(self, wanted: I64, whole: int | None) -> Reading:
        wanted = wanted[wanted != EMPTY]
        numbers = self.cache.missing(wanted, whole)
        return Reading(numbers, needed_whole(numbers, wanted, whole))

    def _read(self, reading: Reading) -> Staged:
        return self.cache.storage.stage((self.edited or self.store).read(*reading))

    def fetch(self, row_ids: I64, whole: int | None = None) -> npt.NDArray[np.int32]:
        """Slots int32 [T, ...] of row ids. Their distinct records must not outnumber the slots.

        Raises RowReadError or MemoryError; the cache then is still right, and a later call reads
        the missing records again.
        """
        looked_up = self._records_of(row_ids)
        wanted = looked_up[looked_up != EMPTY]
        whole = whole if self._splits else None
        # Of a window, only the last row is new: the others were counted at earlier steps.
        new = looked_up if looked_up.ndim == 1 else looked_up[:, -self.keys.each :].ravel()
        self.cache.use(new, whole)
        self._install_pending(wanted)
        missing = self._missing(wanted, whole)
        if len(missing.numbers):
            records = self._timed(partial(self._read, missing))
            self.cache.install(missing.numbers, records, wanted, missing.whole)
        return np.where(looked_up == EMPTY, EMPTY, self.cache.slots_of(looked_up))

    def _install_pending(self, keep: I64) -> None:
        if self._pending is None or self._background is None:
            return
        (read, started), self._pending = self._pending, None
        records = self._timed(partial(self._background.result, started))
        # Records of an abandoned generation are not wanted now, and would evict some of `keep`.
        numbers, whole = read
        wanted = np.isin(numbers, keep)
        if records is None:
            failed = started.done() and not started.cancelled() and started.exception()
            if self.store.distant and wanted.all() and isinstance(failed, RowReadError):
                raise failed  # as over a network all tries were made
            return  # fetch reads what is missing again, and reports the error if it persists
        if wanted.all():  # nearly always, so avoid the copy that choosing makes
            self.cache.install(numbers, records, keep, whole)
        elif wanted.any():
            self.cache.install(numbers[wanted], records[wanted], keep, whole[wanted])

    def _forget_unused(self, store: EditedStore) -> None:
        """Free the numbers of made records without users; an interrupt may end it anywhere."""
        gone = store.unused()
        if not len(gone):
            return
        if self._background and self._pending and np.isin(self._pending[0].numbers, gone).any():
            self._background.result(self._pending[1])  # wait, because it reads these numbers
            self._pending = None
        self.cache.forget(gone)
        store.forget(gone)

    def _timed(self, wait: Callable[[], T]) -> T:
        started = time.perf_counter()
        try:
            return wait()
        finally:
            self.stall_seconds += time.perf_counter() - started

    def close(self) -> None:
        """Wait for the read under way, end the thread, close the store."""
        self.store.stop()
        if self._background is not None:
            self._background.close()
        self._pending = None
        self.store.close()
