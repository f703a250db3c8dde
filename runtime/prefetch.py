"""The prefetcher: brings rows into the cache, ahead of need where the ids are known ahead.

`submit(ids)` starts reading in a thread what the cache lacks; `fetch(ids)` returns the slots of all
ids, waiting for that read and reading itself what nobody submitted. Only `fetch` changes the cache,
in the caller's thread, between two steps of the engine: the graph never reads a slot that is being
written. At most one read is under way, and a record is never read twice for the same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from stem_edge.errors import RowReadError
from stem_edge.quantize import U8
from stem_edge.runtime.cache import I64, RowCache
from stem_edge.runtime.store import RowStore


class Prefetcher:
    """Serves one engine; only its thread calls it. Without `overlap`, submit does nothing."""

    def __init__(self, store: RowStore, cache: RowCache, *, overlap: bool = True) -> None:
        self.store, self.cache = store, cache
        self.stall_seconds = 0.0  # time that fetch waited for flash
        self._thread = (
            ThreadPoolExecutor(1, thread_name_prefix="stem-edge-prefetch") if overlap else None
        )
        self._pending: tuple[I64, Future[U8]] | None = None

    def submit(self, token_ids: I64) -> None:
        """Start reading the records of these ids that are in no slot."""
        if self._thread is None or self._pending is not None:
            return
        wanted = self.cache.missing(token_ids)
        if len(wanted):
            self._pending = (wanted, self._thread.submit(self.store.read, wanted))

    def fetch(self, token_ids: I64) -> npt.NDArray[np.int32]:
        """Slots int32 [T] of the ids [T], all resident until the next call.

        There must be at least as many slots as distinct ids. Raises RowReadError; what
        the cache holds is then still right, and a later call reads again what is missing.
        """
        self.cache.use(token_ids)
        self._install_pending(token_ids)
        missing = self.cache.missing(token_ids)
        if len(missing):
            records = self._timed(lambda: self.store.read(missing))
            self.cache.install(missing, records, token_ids)
        return self.cache.slots_of(token_ids)

    def _install_pending(self, keep: I64) -> None:
        if self._pending is None:
            return
        (read, future), self._pending = self._pending, None
        try:
            records = self._timed(future.result)
        except RowReadError:
            return  # what is wanted now is read again by fetch, which reports the error
        # What was submitted but is not wanted now (an abandoned generation) would push out `keep`.
        wanted = np.isin(read, keep)
        if wanted.any():
            self.cache.install(read[wanted], records[wanted], keep)

    def _timed(self, wait: Callable[[], U8]) -> U8:
        started = time.perf_counter()
        try:
            return wait()
        finally:
            self.stall_seconds += time.perf_counter() - started

    def close(self) -> None:
        """Wait for the read that is under way and end the thread."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._pending = None
