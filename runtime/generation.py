"""The generation loop: sample a token, start reading its rows, hand it out, compute the next logits."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import LESS_MEMORY
from stem_edge.runtime.engine import Context, Engine
from stem_edge.runtime.lookups.overlay import Lookups
from stem_edge.runtime.sampling import (
    SamplingParams,
    TokenLogprobs,
    needed_logits,
    token_logprobs,
)
from stem_edge.runtime.stats import Recorder
from stem_edge.runtime.text.codec import TokenStream
from stem_edge.system.memory import raise_out_of_memory

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Chunk:
    """A piece of generated text with the tokens it came from.

    The texts of all chunks, joined, are the generated text. A token that ends the generation is
    among the ids, but its text is left out.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None  # one per token, if requested
    finish_reason: FinishReason | None  # on the last chunk: "stop", or "length" when room ran out


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
) -> Iterator[Sampled]:
    """Process the prompt, then yield new tokens until one ends the answer or the context is full.

    The context may have processed the prompt's first tokens already.
    """
    cached, prompt, top = context.position, tuple(answer.seen), answer.top
    for logits in engine.process(context, prompt, lookups.prompt, computed=cached, top=top):
        last = logits[0]
    record.prefilled(len(prompt), cached)
    while True:
        sampled = answer.choose(last, room=context.room)
        stem_ids = np.array([lookups.of_token(sampled.token_id)])
        if sampled.finish_reason is None:
            engine.expect(stem_ids)  # read its rows while the caller handles the token
        record.sampled()
        yield sampled
        if sampled.finish_reason is not None:
            return
        started = time.perf_counter()
        token_ids = np.array([sampled.token_id])
        last = engine.step(context, token_ids, stem_ids=stem_ids, top=top)[0]
        record.decoded(time.perf_counter() - started)


def join_chunks(
    tokens: Generator[Sampled], stream: TokenStream, *, logprobs: bool
) -> Generator[Chunk]:
    """Yield sampled tokens as chunks, each as soon as its text is certain; end at a stop text."""
    token_ids: list[int] = []  # since the last chunk, as are the log probabilities
    found: list[TokenLogprobs] = []
    try:
        # Otherwise an error below would keep it, and its KV cache, as long as its traceback.
        with closing(tokens):
            for token, logprob, reason in tokens:
                token_ids.append(token)
                if logprob is not None:
                    found.append(logprob)
                text = stream.push(token)
                if stream.stopped:
                    reason = "stop"
                elif reason:
                    text += stream.finish()
                if text or reason:
                    yield Chunk(text, token_ids, found if logprobs else None, reason)
                    token_ids, found = [], []
                if reason:
                    return
    except MemoryError as error:
        raise_out_of_memory(error, "to generate", LESS_MEMORY)
