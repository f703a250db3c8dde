"""The scheduler: decodes several sequences together, and decides which computes next."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from stem_edge.errors import InputError, OutOfMemoryError, StemEdgeError
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.context import in_steps
from stem_edge.runtime.backends.costs import LESS_MEMORY
from stem_edge.runtime.engine import Engine, Step
from stem_edge.runtime.prefixes.kept import Prefixes
from stem_edge.runtime.scheduling.loop import Loop
from stem_edge.runtime.scheduling.request import Chunk, Request, Stepping
from stem_edge.runtime.stats import Recorder
from stem_edge.system.memory import raise_out_of_memory

if TYPE_CHECKING:
    from stem_edge.runtime.backends.interface import BackendPlaces


class Scheduler(Loop):
    """Decodes up to `size` sequences together. One thread steps; any thread may submit and cancel.

    Requests begin in the order of submission, one prompt at a time. A request begins once fewer
    than `size` sequences run, and its KV cache fits the limit of `prefixes`. If nothing runs, any request may begin.

    A sequence that runs alone decodes in its own context, with drafts, so a step may yield several
    tokens. When a second sequence begins, both decode in a batch without drafts.

    length: most tokens of a sequence. record: counts tokens and times. steady: a single sequence also decodes in
    the batch, so that tokens do not depend on the number of sequences. Raises OutOfMemoryError.
    """

    def __init__(
        self,
        engine: Engine,
        prefixes: Prefixes,
        stepping: Stepping,
        record: Recorder,
        length: int,
        size: int,
        *,
        steady: bool,
    ) -> None:
        super().__init__(engine, prefixes, stepping)
        self._record = record
        # A step of a batch takes the memory of a step that gives the logits of each of its tokens.
        self.size = min(size, engine.logit_tokens)
        self._length = length
        # None: sequences step one by one, because batches may change bits.
        self._places: BackendPlaces | None = None
        if stepping.batches:
            backend = engine.backend
            self._places = engine.in_turn(lambda: backend.open_places(self.size, length))
        self._steady = steady and not stepping.exact and self._places is not None
        self._waiting, self._closed = deque[Request](), False
        self._prompt: Request | None = None  # its prompt is being computed
        self._running: list[Request] = []  # in the order of their places
        self._lone: Request | None = None  # runs alone, in its own context
        self._prompt_next = False  # whether the next unit is a chunk of the prompt

    def submit(self, request: Request) -> None:
        """Append a request to the queue. Any thread may call it. Raises InputError after `close`.

        It does not wake a thread that waits for work.
        """
        self._waiting.append(request)
        if self._closed:  # after the append, because `close` may run at the same time
            request.end()
            raise InputError("this scheduler is closed; make another")

    def check_usable(self) -> None:
        self._engine.check_usable()

    @property
    def busy(self) -> bool:
        """True if a step has work to do. Any thread may ask."""
        return bool(self._waiting or self._running or self._prompt is not None)

    @property
    def free(self) -> int:
        """Number of requests that can begin, beyond the running and queued ones."""
        taken = len(self._running) + len(self._waiting) + (self._prompt is not None)
        return self.size - taken

    def step(self) -> list[tuple[Request, Chunk]]:
        """Compute a prompt chunk, or decode all running sequences once; return (request, new chunk) pairs.

        If a request fails with a StemEdgeError, its last chunk has the error. Raises InputError once the model
        is closed, and exceptions that are not a StemEdgeError. After either, call `close`.
        """
        self._chunks = []
        self._drop_cancelled()
        self._admit()
        if self._prompt is not None and (self._prompt_next or not self._running):
            self._prompt_next = False
            with self._errors_of(self._prompt):
                if self._process_chunk(self._prompt, _together(self._running)):
                    self._began(self._prompt)
        elif self._lone is not None:
            with self._errors_of(self._lone):
                self._decode_alone(self._lone)
        elif (decode := _together(self._running)) is not None:
            self._prompt_next = self._prompt is not None
            self._decode(decode)
        self._admit()
        return self._chunks

    def close(self) -> None:
        """End all requests and release everything. Takes no lock, and may be called again."""
        self._places = None
        for request in [*self._running, self._prompt]:
            if request is not None:
                request.end()
        self._running, self._prompt, self._lone = [], None, None
        self._closed = True
        while self._waiting:
            self._waiting.popleft().end()

    def _drop_cancelled(self) -> None:
        for request in [*self._running, self._prompt]:
            if request is not None and request.cancelled:
                self._end(request)
        for request in self._waiting.copy():  # at once, because other threads append
            if request.cancelled:
                request.end()
                with suppress(ValueError):  # `close` was faster
                    self._waiting.remove(request)

    def _admit(self) -> None:
        """Begin the first request of the queue if `size` and memory allow another sequence."""
        while self._prompt is None and self._waiting and len(self._running) < self.size:
            request = self._waiting[0]
            if not self._fits(request):
                return
            if self._lone is not None and not self._joined(self._lone):
                return
            self._prompt = request  # first, so that `close` finds it
            self._waiting.popleft()
            with self._errors_of(request):
                request.begin(self._engine, self._prefixes)
                if self._running:  # memory for its whole context, which it joins the batch with
                    self._prefixes.make_room(request.context, request.context.room)
                else:
                    self._engine.expect(request.steps[0])

    def _fits(self, request: Request) -> bool:
        """True if the request's KV cache fits, or if nothing runs, so that waiting is useless."""
        tokens = min(in_steps(request.length), self._length)
        return not self._running or self._prefixes.fits(self._prefixes.nbytes_of(tokens))

    def _began(self, request: Request) -> None:
        """Start decoding a sequence whose prompt has been computed."""
        if self._running or self._steady:
            self._join(request)
        else:
            self._lone = request
            request.guesses = self._stepping.guesses(request.context)
        self._running.append(request)
        self._prompt = None

    def _joined(self, lone: Request) -> bool:
        """Move the lone sequence into the batch; return False if there is not enough memory."""
        with self._errors_of(lone):
            try:
                self._join(lone)
            except OutOfMemoryError:
                self._engine.check_usable()
                return False
        return True

    def _join(self, request: Request) -> None:
        self._prefixes.make_room(request.context, request.context.room)
        if self._places is not None:
            context = request.context
            context.joined = True  # first, so that nothing of it is kept if this is interrupted
            self._engine.in_turn(partial(self._places.join, context.backend, context.position))
        request.guesses = None
        self._lone = None

    def _decode(self, step: Step) -> None:
        running, started = list(self._running), time.perf_counter()
        following = None if self._prompt is None else self._prompt.steps[0]
        found = self._logits(step, following)
        steps = len(running) if self._places is None else 1
        self._record.decoded(time.perf_counter() - started, steps=steps)
        for request, logits in zip(running, found, strict=True):
            with self._errors_of(request):
                if isinstance(logits, Exception):
                    raise logits
                request.choose(logits)
                self._record.sampled()
        if self._prompt is None and (expected := _together(self._running)) is not None:
            self._engine.expect(expected)
        for request in running:
            if not request.ended:
                with self._errors_of(request):
                    self._hand_out(request)

    def _logits(self, step: Step, following: Step | None) -> list[F32 | Exception]:
        """Process one token of each running sequence; return the logits [V] or the error of each.

        If the common step fails, each sequence is tried alone. following: see Engine.step. Raises
        InputError once the model is closed.
        """
        engine, contexts = self._engine, [request.context for request in self._running]
        if self._places is not None:
            try:
                return list(engine.step(contexts, step, following))
            except StemEdgeError as error:
                engine.check_usable()
                if len(contexts) == 1:
                    return [error]
        found, last = list[F32 | Exception](), len(contexts) - 1
        for place, context in enumerate(contexts):
            one = Step(step.token_ids[[place]], step.row_ids[[place]], 1)
            try:
                after = following if place == last else None
                found.append(engine.step([context], one, after)[0])
            except (StemEdgeError, MemoryError) as error:
                engine.check_usable()
                found.append(error)
        return found

    @contextmanager
    def _errors_of(self, request: Request) -> Iterator[None]:
        """Let an error in this block end only this request, unless the model is closed."""
        try:
            try:
                yield
            except MemoryError as error:
                raise_out_of_memory(error, "to generate", LESS_MEMORY)
        except StemEdgeError as error:
            self._engine.check_usable()
            self._end(request, error)
            if not request.cancelled:
                self._chunks.append((request, request.failed(error)))

    def _end(self, request: Request, error: StemEdgeError | None = None) -> None:
        place = self._running.index(request) if request in self._running else None
        if request is self._lone:
            self._lone = None
        elif place is not None and self._places is not None:
            context = request.context
            context.position = context.computed
            self._engine.in_turn(partial(self._places.leave, place, context.position))
            context.joined = False
        self._record.update()
        request.end(error)  # while it is in the lists: if this is interrupted, `close` ends it
        if place is None:
            self._prompt = None
            return
        last = self._running.pop()
        if place < len(self._running):
            self._running[place] = last


def _together(requests: Sequence[Request]) -> Step | None:
    """Return one step with the latest token of each unfinished request; None if all have finished."""
    steps = [request.last for request in requests if request.goes_on]
    if not steps:
        return None
    tokens, row_ids, _, _ = zip(*steps, strict=True)
    return Step(np.concatenate(tokens), np.concatenate(row_ids), len(steps))
