"""A thread that runs one call after another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
# A waiting caller checks this often that the thread is alive, because one that dies says nothing.
POLL_SECONDS = 0.5


class Background:
    """Runs calls in order in a thread of its own; only one thread may use it.

    A thread that cannot start or has died is no error: the call has no result, and the next call
    gets a new thread.
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
        """Start a call; return None if no thread can run it."""
        try:
            return self._pool.submit(call)
        except (RuntimeError, MemoryError):  # no threads left, or the interpreter is ending
            self.close()  # also cancels the call if it was queued
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
