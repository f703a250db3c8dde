"""Sampling that follows a given text: it computes each token as ever, and takes the text's instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stem_edge.numerics.quantize import F32
from stem_edge.runtime.sampling import Sampler, SamplingParams


@dataclass(frozen=True)
class Following(SamplingParams):
    """Options of an answer that is known: greedy decoding, with the tokens of `text`.

    text: prompt and answer, with at least max_new_tokens tokens after the prompt. chosen: called
    with each token of the answer when it is chosen.
    """

    text: tuple[int, ...] = ()
    chosen: Callable[[int], None] = lambda token: None

    def sampler(self) -> Sampler:
        greedy = super().sampler()

        def choose(logits: F32, seen: Sequence[int]) -> int:
            greedy(logits, seen)  # because it belongs to the time of a token
            token = self.text[len(seen)]
            self.chosen(token)
            return token

        return choose
