"""A prompt and its answer, and what it holds while it is computed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from stem_edge.numerics.quantize import F32, I64
from stem_edge.runtime.backends.interface import PREFILL_FROM
from stem_edge.runtime.decoding import Decoding
from stem_edge.runtime.engine import Context, Engine, Guesses, Step
from stem_edge.runtime.generation import Answer, Chunk, Chunks, Sampled
from stem_edge.runtime.lookups.lookups import Lookups
from stem_edge.runtime.prefixes.kept import Prefixes
from stem_edge.runtime.prefixes.prefix import Reservation
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.runtime.stats import Recorder
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.system.memory import raise_out_of_memory

if TYPE_CHECKING:
    from stem_edge.runtime.grammars.constraint import GrammarConstraint

# Lends the guesses for an answer to a prompt, by most tokens of both and its context.
Guessing: TypeAlias = Callable[[Sequence[int], int, Context], AbstractContextManager[Guesses]]


class Request:
    """A prompt to continue, made by Model.request for Scheduler.submit, once.

    Its figures belong to the thread that steps the scheduler; others may read them, too.

    length: most tokens of prompt and answer that are processed. constraint: what the answer may be.
    """

    answer: Answer  # these are there once it has begun
    chunks: Chunks
    sampled: Sampled  # the token chosen last
    row_ids: I64  # [1, ...], what it looks up
    context: Context  # until it has joined a batch that copies

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        lookups: Lookups,
        length: int,
        codec: TextCodec,
        eos_ids: Collection[int],
        *,
        constraint: GrammarConstraint | None = None,
    ) -> None:
        self.prompt, self.lookups, self.length = prompt, lookups, length
        self.cancelled = False  # set by any thread
        self.ended = False  # no more chunks come
        self.steps = deque[Step]()  # of the prompt, still to do
        self.prompt_seconds = 0.0  # that those done took
        self.cached_tokens = 0  # of the prompt, which an earlier call had computed
        self.new_tokens = 0
        self.decode_seconds = 0.0  # between the first new token and the latest
        self.decoding: Decoding | None = None  # while it is alone
        self._first = 0.0  # time of the first new token
        self._params, self._codec, self._eos_ids = params, codec, eos_ids
        self._constraint = constraint
        self._lent: AbstractContextManager[Context] | None = None
        self._guessing: AbstractContextManager[Guesses] | None = None
        self._reservation: Reservation | None = None

    @property
    def prompt_tokens(self) -> int:
        """Count of the tokens to continue."""
        return len(self.prompt)

    @property
    def prompt_computed(self) -> bool:
        """Tell whether the prompt has been computed, so that tokens come."""
        return self.new_tokens > 0

    @property
    def prefill(self) -> bool:
        """Tell whether the graph for prompts computes it, where there is one."""
        return len(self.prompt) >= PREFILL_FROM

    @property
    def position(self) -> int:
        """Place of the token chosen last in the text."""
        return len(self.answer.seen) - 1

    @property
    def goes_on(self) -> bool:
        """Tell whether the token chosen last is to be processed."""
        return self.sampled.finish_reason is None

    def begin(self, engine: Engine, prefixes: Prefixes, length: int, *, whole: bool) -> None:
        """Take a context for up to `length` tokens, and cut the prompt into steps.

        whole: take the memory of a full context, rather than as it fills.
        """
        self.answer = Answer(self.prompt, self._params, self._eos_ids, self._constraint)
        self.chunks = Chunks(self._codec, self._params, self._eos_ids)
        self.lookups.__enter__()
        lent = prefixes.lent(self.prompt, self.lookups.places, length, whole=whole)
        self.context = lent.__enter__()
        self._lent = lent
        # Fewer than it has room for, where contexts must have the length of a batch.
        self.context.length = self.length
        self.cached_tokens = self.context.position
        row_ids = self.lookups.prompt
        self.steps.extend(engine.steps(self.prompt, row_ids, computed=self.cached_tokens))

    def reserve(self, prefixes: Prefixes, nbytes: int) -> None:
        """Take memory in a batch."""
        self._reservation = prefixes.reserve(nbytes)

    def release(self) -> None:
        """Give back memory in a batch."""
        if self._reservation is not None:
            self._reservation.release()

    def alone(
        self, engine: Engine, record: Recorder, guessing: Guessing, *, exact: bool
    ) -> Decoding:
        """Return what decodes in the context, made at the first call."""
        if self.decoding is None:
            lent = guessing(self.prompt, self.length, self.context)
            guesses = lent.__enter__()
            self._guessing = lent
            self.decoding = Decoding(
                engine, self.context, self.answer, self.lookups, record, guesses, exact=exact
            )
        return self.decoding

    def choose(self, logits: F32) -> None:
        """Choose the next token by logits [V]. All before have been processed."""
        self.take(self.answer.choose(logits, room=self.length - len(self.answer.seen)))

    def take(self, sampled: Sampled) -> None:
        """Note the next token."""
        self.sampled = sampled
        if self.goes_on:
            self.row_ids = self.lookups.after(self.answer.seen)

    def hand_out(self) -> Chunk | None:
        """Return a chunk if the token chosen last makes text certain, or is the last of all."""
        now = time.perf_counter()
        self._first = self._first or now
        self.new_tokens, self.decode_seconds = self.new_tokens + 1, now - self._first
        return self.chunks.push(self.sampled)

    def stop_guessing(self) -> None:
        """Give back what guesses hold."""
        self.decoding = None
        guessing, self._guessing = self._guessing, None
        if guessing is not None:
            guessing.__exit__(None, None, None)

    def free_context(self, error: BaseException | None = None) -> None:
        """Give the context back, which is kept for later prompts unless there was an error."""
        lent, self._lent = self._lent, None
        if lent is not None:
            del self.context
            lent.__exit__(None if error is None else type(error), error, None)

    def end(self, error: BaseException | None = None) -> None:
        """Give everything back; takes no lock, and may be called again."""
        self.ended = True
        self.stop_guessing()
        self.free_context(error)
        self.lookups.__exit__()
        self.release()


def next_step(requests: Sequence[Request]) -> Step | None:
    """Return the step of the tokens that these chose last, without those known to end; None without any."""
    going = [request for request in requests if request.goes_on]
    tokens = np.array([request.answer.seen[-1] for request in going], np.int64)
    if not going:
        return None
    return Step(tokens, np.concatenate([request.row_ids for request in going]), len(going))


@contextmanager
def out_of_memory(doing: str, advice: str) -> Iterator[None]:
    """Turn MemoryError into OutOfMemoryError, as raise_out_of_memory does."""
    try:
        yield
    except MemoryError as error:
        raise_out_of_memory(error, doing, advice)
