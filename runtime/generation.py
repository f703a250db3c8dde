"""The generation loop: sample a token, start reading its rows, hand it out, compute the next logits.

With guesses at the tokens that follow (stem_edge.runtime.speculation), a step computes these, too. A
token is chosen from its logits just as without: with the same sampler, the same random numbers, and
the same tokens before it. It is a guess come true, or what follows it in the step is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from stem_edge.errors import StemEdgeError
from stem_edge.numerics.quantize import F32, I64
from stem_edge.runtime.backends.interface import LESS_MEMORY
from stem_edge.runtime.engine import Context, Engine, Step
from stem_edge.runtime.lookups.overlay import Lookups
from stem_edge.runtime.sampling import (
    SamplingParams,
    TokenLogprobs,
    needed_logits,
    token_logprobs,
)
from stem_edge.runtime.speculation.speculation import NO_GUESSES, Guesses
from stem_edge.runtime.stats import Recorder
from stem_edge.runtime.text.codec import TokenStream
from stem_edge.system.memory import raise_out_of_memory

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class Chunk:
    """A piece of generated text with the tokens it came from.

    The texts of all chunks, joined, are the generated text. A token that ends the generation is
    among the ids, but its text is left out.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None  # one per token, if requested
    # On the last chunk: "stop", "length" when room ran out, or "error", only in generate_many.
    finish_reason: FinishReason | None
    error: StemEdgeError | None = None
    stop: str | None = None  # the stop text that ended it


class Sampled(NamedTuple):
    """A new token and, if it is the last one, the reason."""

    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None


class Answer:
    """The new tokens of one sequence: chooses each from its logits, and says when it was the last."""

    def __init__(
        self, prompt: Sequence[int], params: SamplingParams, eos_ids: Collection[int]
    ) -> None:
        self.seen = list(prompt)  # prompt and answer so far
        self.top = needed_logits(params)  # of the largest logits, see BackendContext.finish
        self._sampler = params.sampler()
        self._logprobs, self._eos_ids = params.logprobs, eos_ids

    def choose(self, logits: F32, *, room: int) -> Sampled:
        """Choose a token by logits [V]; room: tokens that the context can still take."""
        # The sampler may change the logits, but log probabilities are those of the model itself.
        scores = logits if self._logprobs is None else logits.copy()
        token = self._sampler(scores, self.seen)
        logprobs: TokenLogprobs | None = None
        reason: FinishReason | None = None
        if self._logprobs is not None:
            logprobs = token_logprobs(logits, token, self._logprobs)
        if token in self._eos_ids:
            reason = "stop"
        elif not room:
            reason = "length"
        self.seen.append(token)
        return Sampled(token, logprobs, reason)


def sample_tokens(
    engine: Engine,
    context: Context,
    answer: Answer,
    lookups: Lookups,
    record: Recorder,
    guesses: Guesses = NO_GUESSES,
) -> Iterator[Sampled]:
    """Process the prompt, then yield new tokens until one ends the answer or the context is full.

    The context may have processed the prompt's first tokens already.
    """
    cached, prompt, top = context.position, tuple(answer.seen), answer.top
    for logits in engine.process(context, prompt, lookups.prompt, computed=cached, top=top):
        found = Verified(logits, [])
    record.prefilled(len(prompt), cached)
    while True:
        sampled = yield from _as_drafted(found, answer, context, record)
        started, goes_on = time.perf_counter(), sampled.finish_reason is None
        room, drafts = min(context.room, engine.logit_tokens) - 1, list[int]()
        if goes_on and guesses.quick:
            drafts = guesses.after(answer.seen, room)
        stem_ids = _stem_ids(lookups, [sampled.token_id, *drafts])
        if goes_on:
            engine.expect(stem_ids, len(stem_ids))  # read rows while the caller handles the token
        guessing = time.perf_counter() - started
        record.sampled()
        yield sampled
        if not goes_on:
            return
        started = time.perf_counter()
        if not guesses.quick:
            drafts = guesses.after(answer.seen, room)
            stem_ids = _stem_ids(lookups, [sampled.token_id, *drafts])
        tokens = [sampled.token_id, *drafts]
        found = _verify(engine, context, Step(np.array(tokens), stem_ids, len(tokens)), top)
        seconds = guessing + time.perf_counter() - started
        record.decoded(seconds, records=len(set(stem_ids.tolist())), drafted=len(tokens) - 1)


def _stem_ids(lookups: Lookups, tokens: Sequence[int]) -> I64:
    return np.array([lookups.of_token(token) for token in tokens])


class Verified(NamedTuple):
    """Logits of a token, and of the tokens drafted to follow it."""

    logits: F32  # [1 + drafts, V]
    drafts: list[int]


def _verify(engine: Engine, context: Context, step: Step, top: int) -> Verified:
    """Compute a token and its drafts; the token alone if that fails.

    Otherwise the row of a token that the answer does not have could end it.
    """
    try:
        logits = engine.step(context, step.token_ids, step.logits, stem_ids=step.stem_ids, top=top)
        return Verified(logits, step.token_ids[1:].tolist())
    except StemEdgeError:
        if step.logits == 1:
            raise
        return _verify(engine, context, Step(step.token_ids[:1], step.stem_ids[:1], 1), top)


def _as_drafted(
    found: Verified, answer: Answer, context: Context, record: Recorder
) -> Generator[Sampled, None, Sampled]:
    """Yield tokens while they are as drafted; return the first other one, or the last of all.

    The context then has what comes before it.
    """
    left = len(found.drafts)
    for logits, draft in zip(found.logits, found.drafts, strict=False):
        sampled = answer.choose(logits, room=context.room + left)
        if sampled.token_id != draft or sampled.finish_reason is not None:
            context.rewind(context.position - left)
            return sampled
        left -= 1
        record.sampled(drafted=True)
        yield sampled
    return answer.choose(found.logits[-1], room=context.room)


class Chunks:
    """Joins the tokens of one answer into chunks, each as soon as its text is certain."""

    def __init__(self, stream: TokenStream, params: SamplingParams) -> None:
        self._stream, self._logprobs = stream, params.logprobs is not None
        self._token_ids: list[int] = []  # since the last chunk, as are the log probabilities
        self._found: list[TokenLogprobs] = []

    def push(self, sampled: Sampled) -> Chunk | None:
        """Take a token; return a chunk if there is text, or if a reason or a stop text ends the answer."""
        token, logprob, reason = sampled
        self._token_ids.append(token)
        if logprob is not None:
            self._found.append(logprob)
        text = self._stream.push(token)
        if self._stream.stopped:
            reason = "stop"
        elif reason:
            text += self._stream.finish()
        return self._chunk(text, reason) if text or reason else None

    def failed(self, error: StemEdgeError) -> Chunk:
        """Return the last chunk of an answer that an error ends; text held back is lost."""
        link: BaseException | None = error
        while link is not None:  # its frames would keep a KV cache as long as the chunk
            link = link.with_traceback(None)
            link = link.__cause__ or link.__context__
        return self._chunk("", "error", error)

    def _chunk(
        self, text: str, reason: FinishReason | None, error: StemEdgeError | None = None
    ) -> Chunk:
        found = self._found if self._logprobs else None
        stop = self._stream.stop_text
        chunk = Chunk(text, self._token_ids, found, reason, error, stop)
        self._token_ids, self._found = [], []
        return chunk


def join_chunks(tokens: Generator[Sampled], chunks: Chunks) -> Generator[Chunk]:
    """Yield sampled tokens as chunks; end at a stop text."""
    try:
        # Otherwise an error below would keep it, and its KV cache, as long as its traceback.
        with closing(tokens):
            for sampled in tokens:
                if (chunk := chunks.push(sampled)) is not None:
                    yield chunk
                    if chunk.finish_reason:
                        return
    except MemoryError as error:
        raise_out_of_memory(error, "to generate", LESS_MEMORY)
