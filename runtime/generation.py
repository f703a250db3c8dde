"""The chunks of an answer's text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stem_edge.errors import StemEdgeError
from stem_edge.runtime.sampling import TokenLogprobs

FinishReason = Literal["stop", "length", "error"]


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
