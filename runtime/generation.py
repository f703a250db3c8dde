"""The generation loop: sample a token, start reading its rows, hand it out, compute the next logits."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from stem_edge.errors import StemEdgeError
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import LESS_MEMORY
from stem_edge.runtime.engine import Context, Engine
from stem_edge.runtime.lookups.overlay import Lookups
from stem_edge.runtime.sampling import (
    SamplingParams,
    TokenLogprobs,
    make_sampler,
    needed_logits,
    token_logprobs,
)
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
        self._sampler, self._logprobs, self._eos_ids = (
            make_sampler(params),
            params.logprobs,
            eos_ids,
        )

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
        chunk = Chunk(text, self._token_ids, self._found if self._logprobs else None, reason, error)
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
