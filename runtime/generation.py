"""An answer: its tokens, each chosen from logits, and the chunks of its text."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal, NamedTuple

from stem_edge.errors import StemEdgeError
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.sampling import Sampler, TokenLogprobs, token_logprobs
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.runtime.text.stream import TokenStream

if TYPE_CHECKING:
    from stem_edge.runtime.grammars.constraint import GrammarConstraint

FinishReason = Literal["stop", "length", "error"]
LOOKAHEAD = 32  # forced tokens that are asked for at once


@dataclass(frozen=True)
class Chunk:
    """A piece of generated text with the tokens it came from.

    The texts of all chunks, joined, are the generated text. A token that ends the generation is
    among the ids, but its text is left out.
    """

    text: str  # may end within a word, never within a character
    token_ids: list[int]  # new since the chunk before
    logprobs: list[TokenLogprobs] | None  # one per token, if requested
    # On the last chunk: "stop", "length" when room ran out, or "error", only in generate_many.
    finish_reason: FinishReason | None
    error: StemEdgeError | None = None  # that ended it, with the reason "error"
    stop: str | None = None  # the stop text that ended it
    thoughts: str = ""  # before the answer; only conversations tell them from its text


class Sampled(NamedTuple):
    """A new token and, if it is the last one, the reason."""

    token_id: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None


class Answer:
    """The new tokens of one sequence: chooses each from its logits, and says when it was the last.

    constraint: the texts that it may be; None: any.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        eos_ids: Collection[int],
        constraint: GrammarConstraint | None = None,
    ) -> None:
        self.seen = list(prompt)  # prompt and answer so far
        self._sampler = Sampler(params, len(prompt))
        self._logprobs, self._eos_ids, self._constraint = params.logprobs, eos_ids, constraint
        self._forced, self._asked = deque[int](), False  # tokens without a choice, if asked for

    def forced(self, most: int) -> list[int]:
        """Return the next tokens up to the first choice, `most` at most."""
        if self._constraint is not None and not self._asked:
            self._forced.extend(self._constraint.forced(LOOKAHEAD))
            self._asked = True
        return list(islice(self._forced, most))

    def choose(self, logits: F32, *, room: int) -> Sampled:
        """Choose a token by logits [V]; room: tokens that the context can still take."""
        # The sampler may change the logits, but log probabilities are the model's own.
        scores = logits if self._logprobs is None else logits.copy()
        constraint = self._constraint
        if constraint is not None and self.forced(1):
            self._sampler.skip()
            token = self._forced.popleft()
        else:
            if constraint is not None:
                constraint.mask(scores)
            token = self._sampler(scores, self.seen)
        logprobs: TokenLogprobs | None = None
        reason: FinishReason | None = None
        if self._logprobs is not None:
            logprobs = token_logprobs(logits, token, self._logprobs)
        self.seen.append(token)
        if token in self._eos_ids:
            reason = "stop"
        elif constraint is not None:
            constraint.accept(token)
            self._asked = bool(self._forced)
            reason = "stop" if constraint.ended else None
        if reason is None and not room:
            reason = "length"
        return Sampled(token, logprobs, reason)


class Chunks:
    """Joins the tokens of one answer into chunks, each as soon as its text is certain."""

    def __init__(self, codec: TextCodec, params: SamplingParams, eos_ids: Collection[int]) -> None:
        skip, self._logprobs = params.skip_special_tokens, params.logprobs is not None
        if skip and (kept := params.kept_special_tokens):
            skip, eos_ids = False, codec.special_ids(kept).union(eos_ids)
        self._stream = TokenStream(codec, params.stop, skip_special_tokens=skip, silent=eos_ids)
        self._token_ids: list[int] = []  # since the last chunk, as are the log probabilities
        self._waiting: list[TokenLogprobs] = []

    def push(self, sampled: Sampled) -> Chunk | None:
        """Take a token; return a chunk if there is text, or if a reason or a stop text ends the answer."""
        token, logprob, reason = sampled
        self._token_ids.append(token)
        if logprob is not None:
            self._waiting.append(logprob)
        text = self._stream.push(token)
        if self._stream.stopped:
            reason = "stop"
        elif reason:
            text += self._stream.finish()
        return self.chunk(text, reason) if text or reason else None

    def chunk(
        self, text: str, reason: FinishReason | None, error: StemEdgeError | None = None
    ) -> Chunk:
        logprobs = self._waiting if self._logprobs else None
        stop = self._stream.stop_text
        chunk = Chunk(text, self._token_ids, logprobs, reason, error, stop)
        self._token_ids, self._waiting = [], []
        return chunk
