"""A prompt and its answer, and how a model decodes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from stem_edge.errors import StemEdgeError
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.context import Context
from stem_edge.runtime.backends.interface import PREFILL_FROM, SIZES, StepCosts
from stem_edge.runtime.engine import NO_GUESSES, Engine, Guesses, Speculation, Step
from stem_edge.runtime.generation import Answer, Chunk
from stem_edge.runtime.lookups.lookups import Lookups
from stem_edge.runtime.prefixes.kept import Prefixes


class Stepping(NamedTuple):
    """How a model decodes."""

    # Decode several tokens or sequences in a step only where each has the bits of a step alone.
    exact: bool = False
    costs: StepCosts | None = None  # if they are known
    speculation: Speculation | None = None  # None: nothing drafts

    @property
    def same_bits(self) -> bool:
        """True if steps of several tokens are known to give each the bits of a step of its own."""
        return self.costs is not None and self.costs.same_bits

    @property
    def batches(self) -> bool:
        """True if sequences may decode together."""
        return not self.exact or (self.costs is not None and self.costs.same_in_batches)

    def guesses(self, context: Context) -> Guesses:
        """Begin the guesses of an answer that has this context."""
        if self.speculation is None or (self.exact and not self.same_bits):
            return NO_GUESSES
        return self.speculation(context)


class Request:
    """A prompt to continue, made by Model.request for Scheduler.submit, once.

    The thread that steps the scheduler writes its figures; other threads may read them.

    length: most tokens of prompt and answer that are processed. score: called with the logits [n, V] of each step
    of the prompt; the answer then has no tokens.
    """

    answer: Answer  # this and the context are there once it has begun
    context: Context
    last: Step  # of the token chosen last, which is not yet processed

    def __init__(
        self,
        prompt: Sequence[int],
        lookups: Lookups,
        length: int,
        begin_answer: Callable[[], Answer],
        score: Callable[[F32], None] | None = None,
    ) -> None:
        self.prompt, self.lookups, self.length = prompt, lookups, length
        self.begin_answer, self.score = begin_answer, score
        self.cancelled = False  # set by any thread
        self.begun = False  # it has a context
        self.ended = False  # no more chunks come
        self.goes_on = True  # whether the token chosen last is to be processed
        self.steps = deque[Step]()  # of the prompt, still to do
        self.prompt_seconds = 0.0  # of taking a context, and of the steps of the prompt
        self.cached_tokens = 0  # of the prompt, which an earlier call had computed
        self.new_tokens = 0
        self.decode_seconds = 0.0  # between the first new token and the latest
        self._first = 0.0  # time of the first new token
        self.guesses = NO_GUESSES
        self._give_back: Callable[..., None] | None = None

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt)

    @property
    def prefill(self) -> bool:
        """True if the graph for prompts computes the prompt, where there is one."""
        return len(self.prompt) >= PREFILL_FROM

    def begin(self, engine: Engine, prefixes: Prefixes, *, whole: bool = False) -> None:
        """Take a context, and cut the prompt into steps.

        whole: take the memory of a full context at once, rather than as it fills.
        """
        started, self.answer = time.perf_counter(), self.begin_answer()
        self.lookups.__enter__()
        if every := self.score is not None:  # also of tokens that a cached prompt has
            self.context = prefixes.empty(self.length)
        else:
            places = self.lookups.places
            self.context = prefixes.take(self.prompt, places, self.length, whole=whole)
        self._give_back = partial(prefixes.give_back, self.context)
        self.cached_tokens = self.context.position
        rows, cached = self.lookups.prompt, self.cached_tokens
        self.steps.extend(engine.steps(self.prompt, rows, computed=cached, every=every))
        self.prompt_seconds = time.perf_counter() - started
        self.begun = True

    def drafted(self, most: int, forced: int) -> Step:
        """Return the step of the token chosen last with drafts of the tokens after it.

        most: tokens of the step. forced: most tokens without a choice, which are drafts that are right.
        """
        if self.guesses is NO_GUESSES and self.answer.constraint is None:
            return self.last
        seen, room = self.answer.seen, min(self.context.together, most) - 1
        only = self.answer.forced(min(room, forced))
        size = max(size for size in (1, *SIZES) if size <= 1 + len(only))
        drafts = only[: size - 1] or self.guesses.after(seen, room)
        if not drafts:
            return self.last
        tokens = np.array([seen[-1], *drafts])
        return Step(tokens, self.lookups.after(seen, drafts), len(tokens))

    def verify(self, logits: F32, drafts: Sequence[int]) -> Iterator[bool]:
        """Choose tokens while they are as drafted, and the next one; yield after each, True for a draft.

        logits [1 + drafts, V]: of the step. Each token is chosen as without drafts: with the same
        sampler, random numbers and tokens before it. The context then has all tokens but the last.
        """
        context, left = self.context, len(drafts)
        for line, draft in zip(logits, drafts, strict=False):
            self._choose(line, context.room + left)
            if self.answer.seen[-1] != draft or not self.goes_on:
                context.rewind(context.position - left)
                break
            left -= 1
            yield True
        else:
            self._choose(logits[-1], self.length - len(self.answer.seen))
        yield False

    def choose(self, logits: F32) -> None:
        """Choose the next token by logits [V]. All before it have been processed."""
        self._choose(logits, self.length - len(self.answer.seen))

    def _choose(self, logits: F32, room: int) -> None:
        if goes_on := self.answer.choose(logits, room=room):
            seen, plain = self.answer.seen, self.lookups.plain
            token = np.array(seen[-1:], np.int64)
            self.last = Step(token, token if plain else self.lookups.after(seen), 1)
        self.goes_on = goes_on

    def hand_out(self) -> Chunk | None:
        """Return a chunk if the token chosen last makes text certain, or is the last of all."""
        now = time.perf_counter()
        self._first = self._first or now
        self.new_tokens, self.decode_seconds = self.new_tokens + 1, now - self._first
        return self.answer.chunk()

    def end(self, error: BaseException | None = None) -> None:
        """Give everything back; takes no lock, and may be called again.

        The context is cached for later prompts unless there was an error.
        """
        self.ended = True
        self.guesses = NO_GUESSES  # which may hold the context
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            del self.context
            give_back(keep=not isinstance(error, Exception))
        self.lookups.__exit__()


def computed(engine: Engine, context: Context, step: Step) -> tuple[Step, F32]:
    """Compute a token and its drafts; the token alone if that fails.

    Otherwise the row of a draft that the answer does not have could end it.
    """
    compute = partial(engine.step, [context], apart=True)
    try:
        return step, compute(step)
    except StemEdgeError:
        if step.logits == 1:
            raise
    step = Step(step.token_ids[:1], step.row_ids[:1], 1)
    return step, compute(step)


def together(requests: Sequence[Request]) -> Step | None:
    """Return the step of the tokens that requests chose last, without last tokens; None if it is empty."""
    steps = [request.last for request in requests if request.goes_on]
    if not steps:
        return None
    tokens, row_ids, _, _ = zip(*steps, strict=True)
    return Step(np.concatenate(tokens), np.concatenate(row_ids), len(steps))
