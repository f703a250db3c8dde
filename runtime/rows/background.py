"""A thread that reads ahead, and what happens when there is none: time is lost, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# How often a caller who waits looks whether the thread is still there.
POLL_SECONDS = 0.5


class Background:
    """Runs calls one after the other in a thread, which starts with the first one.

    One thread may use it. A thread that cannot start or is gone is no error: the call has no result
    then, and the next call gets a new thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._renew()

    def _renew(self) -> None:
        self._started: list[threading.Thread] = []
        self._pool = ThreadPoolExecutor(
            1, thread_name_prefix=self._name, initializer=_note, initargs=(self._started,)
        )

    def start(self, call: Callable[[], T]) -> Future[T] | None:
        """Begin a call; None if no thread can take it."""
        try:
            return self._pool.submit(call)
        except (RuntimeError, MemoryError):  # no threads left, or the interpreter is ending
            self.close()  # what it may have queued belongs to nobody
            self._renew()
            return None

    def result(self, call: Future[T]) -> T | None:
        """What a call returned, once it has; None if it raised."""
        while True:
            try:
                return call.result() if call.exception(POLL_SECONDS) is None else None
            except TimeoutError:
                # Without memory, a thread can end before it can say so.
                if self._started and not self._started[0].is_alive() and not call.done():
                    self._renew()
                    return None
            except CancelledError:
                return None

    def close(self) -> None:
        """Wait for the call under way and end the thread."""
        self._pool.shutdown(cancel_futures=True)


def _note(started: list[threading.Thread]) -> None:
    started.append(threading.current_thread())
