"""The one thread that computes the answers of all clients."""

from __future__ import annotations

import threading
from collections.abc import Callable

from stem_edge.errors import StemEdgeError
from stem_edge.runtime.batching.request import Request
from stem_edge.runtime.batching.scheduler import Scheduler
from stem_edge.runtime.generation import Chunk
from stem_edge.runtime.model import Model
from stem_edge.serving.refusals import BusyError, EndingError, LoadingError
from stem_edge.serving.reply import Reply


class Compute:
    """Loads a model in a thread of its own, and steps a scheduler there while there are requests.

    sequences: most that decode together. waiting: most requests that have not begun.
    """

    def __init__(self, open_model: Callable[[], Model], *, sequences: int, waiting: int) -> None:
        self.sequences, self._waiting = sequences, waiting
        self._open_model = open_model
        self._model: Model | None = None
        self._scheduler: Scheduler | None = None
        self.failure: Exception | None = None  # why the model could not be loaded
        self._replies: dict[Request, Reply] = {}
        self._lock = threading.Lock()  # of _replies
        self._wake = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="stem-edge compute", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    @property
    def model(self) -> Model:
        """The model. Raises LoadingError until it is loaded."""
        if self._model is None:
            raise LoadingError("the model is being loaded; try again in a moment")
        return self._model

    @property
    def replies(self) -> int:
        """Count of answers that have not ended."""
        return len(self._replies)

    @property
    def queued(self) -> int:
        """Count of requests that have not begun."""
        return self._scheduler.waiting if self._scheduler is not None else 0

    def submit(self, request: Request) -> Reply:
        """Queue a request that `model.request` made; from the event loop.

        Raises BusyError if too many wait, EndingError after `end`.
        """
        if self._ending:
            raise EndingError("the server is ending; ask another, or later")
        if self._scheduler is None:
            raise LoadingError("the model is being loaded; try again in a moment")
        if self._scheduler.free <= -self._waiting:
            raise BusyError(f"{self._waiting} requests are waiting; try again in a moment")
        reply = Reply(request, self._leave)
        with self._lock:
            self._replies[request] = reply
        self._scheduler.submit(request)
        self._wake.set()
        return reply

    def end(self) -> None:
        """Take no more requests, cancel those under way, and wait for the thread."""
        self._ending = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            model = self._open_model()
        except Exception as error:
            self.failure = error
            return
        self._scheduler, self._model = model.scheduler(self.sequences), model
        while not self._ending:
            self._wake.wait()
            self._wake.clear()
            while self._scheduler.busy and not self._ending:
                self._step(self._scheduler)
        self._scheduler.close()
        self._fail(EndingError("the server is ending"))

    def _step(self, scheduler: Scheduler) -> None:
        try:
            for request, chunk in scheduler.step():
                if (reply := self._replies.get(request)) is not None:  # its client may have left
                    reply.push(chunk)
                if chunk.finish_reason is not None:
                    self._forget(request)
        except StemEdgeError as error:  # such as a device that is lost: none can go on
            scheduler.close()
            self._fail(error)

    def _leave(self, request: Request) -> None:
        """Cancel an answer that nobody waits for; one that has ended is forgotten already."""
        request.cancelled = True
        self._forget(request)

    def _forget(self, request: Request) -> None:
        with self._lock:
            self._replies.pop(request, None)

    def _fail(self, error: StemEdgeError) -> None:
        for request, reply in list(self._replies.items()):
            reply.push(Chunk("", [], None, "error", error))
            self._forget(request)
