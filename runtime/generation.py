"""An answer: its tokens, each chosen from logits, and the chunks of its text."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Literal

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


class Answer:
    """The answer of one sequence: chooses each token from its logits, and joins tokens into chunks.

    constraint: the texts that it may be; None: any.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        codec: TextCodec,
        eos_ids: Collection[int],
        constraint: GrammarConstraint | None = None,
    ) -> None:
        self.seen = list(prompt)  # prompt and answer so far
        self._sampler, self._eos_ids = Sampler(params, len(prompt)), eos_ids
        self.params, self.constraint = params, constraint
        self._forced, self._asked = deque[int](), False  # tokens without a choice, if asked for
        self._reason: FinishReason | None = None
        skip, silent = params.skip_special_tokens, eos_ids
        if skip and (kept := params.kept_special_tokens):
            skip, silent = False, codec.special_ids(kept).union(eos_ids)
        self._stream = TokenStream(codec, params.stop, skip_special_tokens=skip, silent=silent)
        self._token_ids: list[int] = []  # since the last chunk, as are the log probabilities
        self._logprobs: list[TokenLogprobs] = []

    def forced(self, most: int) -> list[int]:
        """Return the next tokens up to the first choice, `most` at most."""
        if self.constraint is not None and not self._asked:
            self._forced.extend(self.constraint.forced(LOOKAHEAD))
            self._asked = True
        return list(islice(self._forced, most))

    def choose(self, logits: F32, *, room: int) -> bool:
        """Choose a token by logits [V]; return True if more follow.

        room: tokens that the context can still take.
        """
        # The sampler may change the logits, but log probabilities are the model's own.
        scores = logits if self.params.logprobs is None else logits.copy()
        constraint = self.constraint
        if constraint is not None and self.forced(1):
            self._sampler.skip()
            token = self._forced.popleft()
        else:
            if constraint is not None:
                constraint.mask(scores)
            token = self._sampler(scores, self.seen)
        if self.params.logprobs is not None:
            self._logprobs.append(token_logprobs(logits, token, self.params.logprobs))
        self.seen.append(token)
        if token in self._eos_ids:
            self._reason = "stop"
        elif constraint is not None:
            constraint.accept(token)
            self._asked = bool(self._forced)
            self._reason = "stop" if constraint.ended else None
        if self._reason is None and not room:
            self._reason = "length"
        return self._reason is None

    def chunk(self) -> Chunk | None:
        """Return a chunk if the token chosen last makes text certain, or is the last of all."""
        self._token_ids.append(token := self.seen[-1])
        text = self._stream.push(token)
        if self._stream.stopped:
            self._reason = "stop"
        elif self._reason:
            text += self._stream.finish()
        if not text and not self._reason:
            return None
        ids, logprobs = self._token_ids, None if self.params.logprobs is None else self._logprobs
        self._token_ids, self._logprobs = [], []
        return Chunk(text, ids, logprobs, self._reason, stop=self._stream.stop_text)

    def failed(self, error: StemEdgeError) -> Chunk:
        """Return the last chunk of an answer that an error ends; text held back is lost."""
        logprobs = None if self.params.logprobs is None else self._logprobs[: len(self._token_ids)]
        return Chunk("", self._token_ids, logprobs, "error", error)
