"""The one thread that computes the answers of all clients."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from stem_edge.apps.answers.events import AnswerEvents
from stem_edge.apps.answers.refusals import BUSY, UNAVAILABLE, RefusalError, failed, public
from stem_edge.apps.serving.reply import Replies, Reply
from stem_edge.errors import DeviceLostError, StemEdgeError
from stem_edge.runtime.model import Model
from stem_edge.runtime.rows.rows import RowCounters
from stem_edge.runtime.scheduling.request import Chunk, Request
from stem_edge.runtime.scheduling.scheduler import Scheduler
from stem_edge.system.memory import own_memory, return_freed_memory

log = logging.getLogger(__name__)
UNUSABLE = "the model cannot be used; the log of the server says why"
END_SECONDS = 10.0  # wait for a model that is being loaded when the server ends
REQUESTS_NBYTES = 80 << 20  # memory of requests, and of the process that renders chats
GRAMMAR_NBYTES = 128  # memory of a compiled grammar for each of its characters, roughly


class Compute:
    """The thread that loads the model and computes all answers.

    sequences: largest number of answers that decode together. waiting: that of queued requests.
    """

    def __init__(
        self,
        open_model: Callable[[], AbstractContextManager[Model]],
        *,
        sequences: int,
        waiting: int,
    ) -> None:
        self.sequences, self._waiting = sequences, waiting
        self._open_model = open_model
        self._found: tuple[Model, Scheduler] | None = None  # None until the model is loaded
        # Request whose answer has not ended -> function that delivers its chunks.
        self._deliver = dict[Request, Callable[[Chunk], None]]()
        self.failure: Exception | None = None  # why loading or computing failed for good
        self.memory_limit = 0  # of anonymous memory, for model and requests
        self.counters = RowCounters()  # statistics of rows after the last step
        self._lock = threading.RLock()  # while requests are accepted, so that `end` reaches all
        self._wake = threading.Event()
        self.draining = False  # True: refuse new requests, but answer accepted ones
        self._ending = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, which loads the model. Later calls do nothing."""
        with self._lock:
            if self._thread is None and not self._ending:
                self._thread = threading.Thread(
                    target=self._run, name="stem-edge compute", daemon=True
                )
                self._thread.start()

    @property
    def model(self) -> Model:
        """The model. Raises RefusalError until it is loaded, or if loading failed."""
        return self._loaded()[0]

    @property
    def loaded(self) -> Model | None:
        """The model if it can be used, else None."""
        return self._found[0] if self._found is not None and self.failure is None else None

    def give_back(self) -> None:
        """Return freed memory to the system if this process is near its memory limit."""
        if own_memory() > self.memory_limit - REQUESTS_NBYTES:
            return_freed_memory()

    @property
    def busy(self) -> int:
        """Number of answers that have not ended."""
        return len(self._deliver)

    def check(self, more: int) -> tuple[Model, Scheduler]:
        """Return model and scheduler. Raises RefusalError if the queue cannot hold `more` answers.

        Routes also call it before they tokenize. Prompts that wait to be tokenized are not counted.
        """
        if self.draining:
            raise RefusalError("the server is ending; ask another, or later", status=UNAVAILABLE)
        found, most = self._loaded(), self.sequences + self._waiting
        if more > most:
            raise RefusalError(
                f"{more} answers are asked for; at most {most} can run and wait here"
            )
        if self.busy + more > most:
            raise RefusalError(
                f"{self.busy} requests run or wait, of at most {most}; try again in a moment",
                status=BUSY,
            )
        return found

    def submit(
        self,
        requests: Sequence[Request],
        hold: Callable[[int], None],
        events: Callable[[], AnswerEvents] = AnswerEvents,
    ) -> Replies:
        """Queue all requests or none, and return their replies. Call this in the event loop.

        hold: see Replies. events: called for each request, to split its answer into events.
        Raises RefusalError if too many requests wait, or if the server is ending.
        """
        with self._lock:
            _, scheduler = self.check(len(requests))
            if requests and (grammar := requests[0].params.grammar) is not None:
                hold(len(grammar.text) * GRAMMAR_NBYTES)  # all answers of a request have the same
            replies = Replies(self._leave, hold)
            for request in requests:
                self._deliver[request] = replies.add(Reply(request, events(), self.counters))
                scheduler.submit(request)
        self._wake.set()
        return replies

    def end(self, seconds: float | None = None) -> None:
        """Refuse new requests, end running ones with an error, and wait for the thread.

        seconds: longest wait. A thread that still runs ends with the process.
        """
        self.draining = self._ending = True
        self._wake.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _loaded(self) -> tuple[Model, Scheduler]:
        if self.failure is not None:
            raise failed(UNUSABLE)
        if self._found is None:
            told = "the model is being loaded; try again in a moment"
            raise RefusalError(told, status=UNAVAILABLE)
        return self._found

    def _run(self) -> None:
        try:
            with self._open_model() as model:
                self._serve(model)
        except BaseException as error:
            self._fail(error)

    def _serve(self, model: Model) -> None:
        """Step the scheduler until `end` is called; then end the remaining answers."""
        told = RefusalError("the server has ended before this answer did", status=UNAVAILABLE)
        try:
            self.memory_limit = model.plan.total - model.plan.requests + REQUESTS_NBYTES
            model.limit_texts(self.memory_limit)
            self.counters = model.engine.rows.counters()
            self._found = model, model.scheduler(self.sequences)
            while not self._ending:
                self._wake.wait()
                self._wake.clear()
                while not self._ending and self._found[1].busy:
                    self._step_all(*self._found)
                self.give_back()
        except BaseException as error:
            self._fail(error)  # first, so that no new request is accepted
            told = failed()
        finally:
            with self._lock:
                self._end_all(told)

    def _fail(self, error: BaseException) -> None:
        """Record why the model is unusable; /health and all requests report it.

        Rust panics derive from BaseException: they are caught and reported, too.
        """
        self.failure = error if isinstance(error, Exception) else failed(repr(error))
        unexpected = None if isinstance(error, StemEdgeError) else error
        log.error("the model cannot be used: %s", error, exc_info=unexpected)

    def _step_all(self, model: Model, scheduler: Scheduler) -> None:
        """Compute one step of all answers; if it fails, end all answers with the error."""
        told = None
        try:
            self._step(model, scheduler)
        except DeviceLostError:
            raise
        except Exception as error:  # none of the answers can go on
            told = public(error).with_traceback(None)
        if told is not None:  # outside of `except`, where the error would hold the batch's memory
            with self._lock:  # until there is another scheduler
                self._end_all(told)
                model.engine.check_usable()
                self._found = model, model.scheduler(self.sequences)

    def _step(self, model: Model, scheduler: Scheduler) -> None:
        found = scheduler.step()
        self.counters = model.engine.rows.counters()
        for request, chunk in found:
            take = self._deliver.get if chunk.finish_reason is None else self._deliver.pop
            if (deliver := take(request, None)) is not None:  # else cancelled meanwhile
                deliver(chunk)
            if isinstance(chunk.error, DeviceLostError):
                raise chunk.error

    def _leave(self, request: Request) -> None:
        """Cancel an answer after its client has left, unless it has ended."""
        request.cancelled = True
        self._deliver.pop(request, None)

    def _end_all(self, told: RefusalError) -> None:
        if self._found is not None:
            self._found[1].close()
        for request in list(self._deliver):
            if (deliver := self._deliver.pop(request, None)) is not None:
                deliver(Chunk("", [], None, "error", told))
