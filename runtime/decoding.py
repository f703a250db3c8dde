"""Decoding one sequence in its context, a step at a time, and what a step may hold.

A step may also compute guesses at the next tokens (stem_edge.runtime.speculation). A token is chosen
from its logits just as without guesses: with the same sampler, the same random numbers, and the same
tokens before it. If it differs from the guess, the rest of the step is dropped. Where a constraint
allows only one token, the guess is always right.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from stem_edge.errors import StemEdgeError
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import MOST, SIZES, StepCosts
from stem_edge.runtime.engine import NO_GUESSES, Context, Engine, Guesses, Step
from stem_edge.runtime.generation import Answer, Sampled
from stem_edge.runtime.lookups.lookups import Lookups
from stem_edge.runtime.stats import Recorder

if TYPE_CHECKING:
    from stem_edge.runtime.speculation.speculation import Speculation


class Decoding:
    """Steps of one answer. Once a token was chosen, the context has all tokens but the last.

    exact: compute tokens together only as guesses: see Stepping.one_by_one.
    """

    def __init__(
        self,
        engine: Engine,
        context: Context,
        answer: Answer,
        lookups: Lookups,
        record: Recorder,
        guesses: Guesses = NO_GUESSES,
        *,
        exact: bool = False,
    ) -> None:
        self._engine, self._context, self._answer = engine, context, answer
        self._lookups, self._record, self._guesses = lookups, record, guesses
        self._forced = 0 if exact else MOST  # most tokens without a choice in a step
        self._next: Step | None = None  # once it is known
        self._guessing = 0.0  # seconds that it took to know it

    def after(self, logits: F32) -> Iterator[Sampled]:
        """Yield the first token, by logits [1, V] of the prompt's last."""
        return self._chosen(Verified(logits, []))

    def step(self) -> Iterator[Sampled]:
        """Process the token chosen last; yield those that follow, until one is not yet processed.

        A caller that takes them all can take another step, or process that one by other means.
        """
        started = time.perf_counter()
        step, self._next = self._next or self._following(), None
        verified = _verify(self._engine, self._context, step)
        seconds = self._guessing + time.perf_counter() - started
        drafted = len(step.token_ids) - 1
        self._record.decoded(seconds, records=step.records, drafted=drafted)
        self._guessing = 0.0
        return self._chosen(verified)

    def _chosen(self, verified: Verified) -> Iterator[Sampled]:
        sampled = yield from self._as_drafted(verified)
        if sampled.finish_reason is None:
            started = time.perf_counter()
            if self._guesses.quick:
                self._next = self._following()
            step = self._next or self._of()
            # Read rows while the caller handles the token.
            self._engine.expect(step.row_ids, step.logits)
            self._guessing = time.perf_counter() - started
        self._record.sampled()
        yield sampled

    def _as_drafted(self, verified: Verified) -> Generator[Sampled, None, Sampled]:
        """Yield tokens while they are as drafted; return the first other one, or the last of all.

        The context then has what comes before it.
        """
        answer, context, left = self._answer, self._context, len(verified.drafts)
        for logits, draft in zip(verified.logits, verified.drafts, strict=False):
            sampled = answer.choose(logits, room=context.room + left)
            if sampled.token_id != draft or sampled.finish_reason is not None:
                context.rewind(context.position - left)
                return sampled
            left -= 1
            self._record.sampled(drafted=True)
            yield sampled
        return answer.choose(verified.logits[-1], room=context.room)

    def _following(self) -> Step:
        """Return the token chosen last with what follows it, or may."""
        seen = self._answer.seen
        room = min(self._context.together, self._engine.logit_tokens, MOST) - 1
        forced = self._answer.forced(min(room, self._forced))
        size = max(size for size in (1, *SIZES) if size <= 1 + len(forced))
        return self._of(forced[: size - 1] or self._guesses.after(seen, room))

    def _of(self, drafts: Sequence[int] = ()) -> Step:
        seen = self._answer.seen
        tokens = np.array([seen[-1], *drafts])
        return Step(tokens, self._lookups.after(seen, drafts), len(tokens))


def sample_tokens(
    engine: Engine,
    context: Context,
    answer: Answer,
    lookups: Lookups,
    record: Recorder,
    guesses: Guesses = NO_GUESSES,
    *,
    exact: bool = False,
) -> Iterator[Sampled]:
    """Process the prompt, then yield new tokens until one ends the answer or the context is full.

    The context may have processed the prompt's first tokens already.
    """
    cached, prompt = context.position, tuple(answer.seen)
    for logits in engine.process(context, prompt, lookups.prompt, computed=cached):
        last = logits
    record.prefilled(len(prompt), cached)
    decoding = Decoding(engine, context, answer, lookups, record, guesses, exact=exact)
    tokens = decoding.after(last)
    while True:
        for sampled in tokens:
            yield sampled
            if sampled.finish_reason is not None:
                return
        tokens = decoding.step()


class Verified(NamedTuple):
    """Logits of a token, and of the tokens drafted to follow it."""

    logits: F32  # [1 + drafts, V]
    drafts: list[int]


def _verify(engine: Engine, context: Context, step: Step) -> Verified:
    """Compute a token and its drafts; the token alone if that fails.

    Otherwise the row of a token that the answer does not have could end it.
    """
    try:
        rows = step.row_ids
        logits = engine.step(context, step.token_ids, step.logits, row_ids=rows, apart=True)
        return Verified(logits, step.token_ids[1:].tolist())
    except StemEdgeError:
        if step.logits == 1:
            raise
        return _verify(engine, context, Step(step.token_ids[:1], step.row_ids[:1], 1))


class Stepping(NamedTuple):
    """Whether a model decodes several tokens, or sequences, in a step."""

    exact: bool = False  # only where each then has the bits of a step alone
    costs: StepCosts | None = None  # if they are known
    speculation: Speculation | None = None  # None: a step of an answer has one token

    @property
    def same_in_batches(self) -> bool:
        """Whether sequences that decode together are known to have the bits that each has alone."""
        return self.costs is not None and self.costs.same_in_batches

    def one_by_one(self, *, exact: bool) -> bool:
        """Return whether tokens without a choice take a step each, because others would be rounded."""
        return exact and (self.costs is None or not self.costs.same_bits)

    def guessing(
        self, prompt: Sequence[int], length: int, context: Context, *, exact: bool
    ) -> AbstractContextManager[Guesses]:
        """Lend the guesses for an answer; see Speculation.begin."""
        speculation = self.speculation
        if speculation is None or (exact and not speculation.costs.same_bits):
            return nullcontext(NO_GUESSES)
        return speculation.begin(prompt, length, context)
