"""Requests through a scheduler: taken as places become free, and their chunks handed to whom they are for."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from stem_edge.runtime.batching.request import Request
from stem_edge.runtime.batching.scheduler import Scheduler
from stem_edge.runtime.generation import Chunk

T = TypeVar("T")
Item = TypeVar("Item")
Result = TypeVar("Result")
END: Any = object()  # after the last item


class Pump(Generic[T]):
    """Steps a scheduler for the owners of its requests, which are anything but None.

    owners: of the requests that have not ended; any thread may read it, submit and cancel.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.owners = dict[Request, T]()

    def submit(self, request: Request, owner: T) -> None:
        """Queue a request. Raises InputError after the scheduler's `close`."""
        self.owners[request] = owner
        self.scheduler.submit(request)

    def cancel(self, request: Request) -> T | None:
        """End a request: its owner gets no more chunks. Return the owner unless it has ended."""
        self.scheduler.cancel(request)
        return self.owners.pop(request, None)

    def step(self) -> Iterator[tuple[T, Chunk]]:
        """Do one unit of work; yield the chunks that it gave, with the owners of their requests."""
        for request, chunk in self.scheduler.step():
            take = self.owners.get if chunk.finish_reason is None else self.owners.pop
            owner = take(request, None)
            if owner is not None:  # else it was cancelled meanwhile
                yield owner, chunk

    def run(
        self,
        items: Iterator[Item | None],
        begin: Callable[[Item], Result | None],
        push: Callable[[T, Chunk], Result | None],
    ) -> Generator[Result]:
        """Begin items as places become free; yield all results, and close the scheduler at the end.

        items: nothing decodes while it waits for the next one; None: there is none yet.
        begin: submits the requests of an item, or returns its result if it has no requests.
        push: gives an owner a chunk, and returns a result if there is one now.
        """
        scheduler, more = self.scheduler, True
        try:
            while more or scheduler.busy:
                while more and scheduler.free > 0 and (item := next(items, END)) is not None:
                    more = item is not END
                    if more and (result := begin(item)) is not None:
                        scheduler.check_usable()  # otherwise every item could be refused
                        yield result
                with interrupts_held():  # until nothing is left of requests that have ended
                    results = [push(owner, chunk) for owner, chunk in self.step()]
                yield from (result for result in results if result is not None)
        finally:
            scheduler.close()


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold back a first Ctrl-C until the block ends; a second one raises KeyboardInterrupt at once.

    Python drops exceptions in callbacks, such as a weak set's when one of its members goes. Does
    nothing outside the main thread, and where Ctrl-C has another handler.
    """
    usual = signal.default_int_handler
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return
    came = False

    def note(*_: object) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if came:
            raise KeyboardInterrupt
