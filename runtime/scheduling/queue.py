"""Requests that have not begun, in their order, and other work that alternates with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from stem_edge.errors import InputError
from stem_edge.runtime.scheduling.request import Request


class Queue:
    """Requests that wait. Any thread may submit; the others belong to the thread that steps."""

    def __init__(self) -> None:
        self.waiting, self._closed = deque[Request](), False
        self.others = 0  # pieces of other work that have a context
        self.refused = False  # other work, since the last step
        self._others_first = True  # whether they begin before a request

    def submit(self, request: Request) -> None:
        """Put a request at the end. Raises InputError after `close`."""
        self.waiting.append(request)
        if self._closed:  # after that, because `close` may run at the same time
            request.end()
            raise InputError("this scheduler is closed; make another")

    @property
    def first(self) -> Request | None:
        """The request that begins next; None if the queue is empty, or other work goes first."""
        if not self.waiting or (self.refused and self._others_first):
            return None
        return self.waiting[0]

    def begin(self) -> None:
        """Take the first request out."""
        self.waiting.popleft()
        self._others_first = True

    def other(self, fits: Callable[[], bool]) -> AbstractContextManager[None] | None:
        """Return what other work enters while it has a context; None: not yet."""
        if (self._others_first or not self.waiting) and fits():
            self._others_first = False
            return self._beside()
        self.refused = True
        return None

    @contextmanager
    def _beside(self) -> Iterator[None]:
        self.others += 1
        try:
            yield
        finally:
            self.others -= 1

    def drop_cancelled(self) -> None:
        """End the requests that were cancelled."""
        for request in self.waiting.copy():  # at once, because other threads append
            if request.cancelled:
                request.end()
                with suppress(ValueError):  # `close` was faster
                    self.waiting.remove(request)

    def close(self) -> None:
        """End all requests, and those that come."""
        self._closed = True
        while self.waiting:
            self.waiting.popleft().end()
