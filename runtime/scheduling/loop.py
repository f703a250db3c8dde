"""The generation loop of one request: prompt chunks, then decode steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

from stem_edge.runtime.backends.costs import LESS_MEMORY, MOST, PREFILL_FROM
from stem_edge.runtime.engine import Engine, Step
from stem_edge.runtime.prefixes.kept import Prefixes
from stem_edge.runtime.scheduling.request import Chunk, Request, Stepping, computed
from stem_edge.runtime.stats import Recorder
from stem_edge.system.memory import raise_out_of_memory


class Loop:
    """Computes one answer, for Model.generate."""

    _record: Recorder  # counts tokens and times

    def __init__(self, engine: Engine, prefixes: Prefixes, stepping: Stepping) -> None:
        self._engine, self._prefixes, self._stepping = engine, prefixes, stepping
        self._most = min(MOST, engine.logit_tokens)  # tokens of a step with drafts
        self._forced = MOST if stepping.same_bits or not stepping.exact else 0
        self._chunks = list[tuple[Request, Chunk]]()  # of this step

    def run(self, request: Request, recorder: Callable[[], Recorder]) -> Generator[Chunk]:
        """Yield chunks of the answer, then raise its error, if any. recorder: creates metrics."""
        self._record = recorder()
        failure: Exception | None = None
        try:
            while failure is None and not request.ended:
                self._chunks = []
                try:
                    self._advance(request)
                except Exception as error:
                    failure = error
                for _, chunk in self._chunks:
                    yield chunk
            if isinstance(failure, MemoryError):
                raise_out_of_memory(failure, "to generate", LESS_MEMORY)
            if failure is not None:
                raise failure
        finally:
            self._record.update()
            request.end(failure)
            failure = None  # its traceback would keep this frame alive, and with it the context

    def _advance(self, request: Request) -> None:
        if not request.begun:
            request.begin(self._engine, self._prefixes)
            self._engine.expect(request.steps[0])
        if not request.steps:
            self._decode_alone(request)
        elif self._process_chunk(request):
            request.guesses = self._stepping.guesses(request.context)

    def _process_chunk(self, request: Request, following: Step | None = None) -> bool:
        """Process the next chunk of a prompt; return True if it was the last and decoding follows.

        following: the next step, whose rows are read meanwhile; default: the next chunk.
        """
        step, contexts = request.steps[0], [request.context]
        rest = request.steps[1] if len(request.steps) > 1 else None
        started = time.perf_counter()
        prefill = request.prompt_tokens >= PREFILL_FROM
        logits = self._engine.step(contexts, step, following or rest, prefill=prefill)
        request.prompt_seconds += time.perf_counter() - started
        request.steps.popleft()
        if request.score is not None:
            request.score(logits)
            chunk = Chunk("", [], None, "length" if rest is None else None)
            self._chunks.append((request, chunk))
        if rest is not None:
            return False
        tokens, seconds = request.prompt_tokens, request.prompt_seconds
        self._record.prefilled(tokens, request.cached_tokens, seconds)
        if request.score is not None:
            self._end(request)
            return False
        request.choose(logits[0])
        self._record.sampled()
        if request.goes_on:
            self._engine.expect(request.last)
        return self._hand_out(request)

    def _decode_alone(self, request: Request) -> None:
        started = time.perf_counter()
        if request.context.reserved < min(request.context.position + MOST, request.length):
            self._prefixes.make_room(request.context, MOST)
        step = request.drafted(self._most, self._forced)
        step, logits = computed(self._engine, request.context, step)
        drafts = step.token_ids[1:].tolist()
        seconds = time.perf_counter() - started
        self._record.decoded(seconds, drafted=len(drafts))
        for drafted in request.verify(logits, drafts):
            self._record.sampled(drafted=drafted)
            if not drafted and request.goes_on:
                self._engine.expect(request.last)
            if not self._hand_out(request):
                return

    def _hand_out(self, request: Request) -> bool:
        """Append a chunk of final text, if there is any; return False if the answer has ended."""
        chunk = request.hand_out()
        if chunk is not None and not request.cancelled:
            self._chunks.append((request, chunk))
        if chunk is not None and chunk.finish_reason is not None:
            self._end(request)
        return not request.ended

    def _end(self, request: Request) -> None:
        request.end()
        self._record.update()
