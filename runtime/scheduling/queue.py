"""What waits to begin: requests in their order, and work of other kinds in turns with them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress

from stem_edge.errors import InputError
from stem_edge.runtime.scheduling.request import Request


class Queue:
    """Requests that wait. Any thread may submit; the others belong to the thread that steps."""

    def __init__(self) -> None:
        self._waiting, self._closed = deque[Request](), False
        self.others = 0  # pieces of other work that have a context
        self._refused = False  # whether any was since the last step
        self._others_first = True  # whether they begin before a request

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        """Put a request at the end. Raises InputError after `close`."""
        self._waiting.append(request)
        if self._closed:  # after that, because `close` may run at the same time
            request.end()
            raise InputError("this scheduler is closed; make another")

    @property
    def first(self) -> Request | None:
        """The request that begins next; None if the queue is empty, or other work goes first."""
        if not self._waiting or (self._refused and self._others_first):
            return None
        return self._waiting[0]

    def begin(self) -> None:
        """Take the first request out."""
        self._waiting.popleft()
        self._others_first = True

    def other(self, fits: Callable[[], bool]) -> AbstractContextManager[None] | None:
        """Return what other work enters while it has a context; None: not yet."""
        if (self._others_first or not self._waiting) and fits():
            self._others_first = False
            return self._beside()
        self._refused = True
        return None

    @contextmanager
    def _beside(self) -> Iterator[None]:
        self.others += 1
        try:
            yield
        finally:
            self.others -= 1

    def stepped(self) -> None:
        """Note the end of a step, after which other work asks again."""
        self._refused = False

    def drop_cancelled(self) -> None:
        """End the requests that were cancelled."""
        for request in self._waiting.copy():  # at once, because other threads append
            if request.cancelled:
                request.end()
                with suppress(ValueError):  # `close` was faster
                    self._waiting.remove(request)

    def close(self) -> None:
        """End all requests, and those that come."""
        self._closed = True
        while self._waiting:
            self._waiting.popleft().end()
