"""Sampling that follows a given text: it computes each token as ever, and takes the text's instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stem_edge.numerics.quantize import F32
from stem_edge.runtime.sampling import Sampler, sampler_of
from stem_edge.runtime.sampling_params import SamplingParams


@dataclass(frozen=True)
class Following(SamplingParams):
    """Options of an answer that is known: greedy decoding, with the tokens of `text`.

    text: prompt and answer, with at least max_new_tokens tokens after the prompt. chosen: called
    when a token is taken, with it and the one that the model would have taken.
    """

    text: tuple[int, ...] = ()
    chosen: Callable[[int, int], None] = lambda token, own: None


class Follower(Sampler):
    """Takes the tokens of a text."""

    def __init__(self, params: Following) -> None:
        super().__init__(params)
        self._text, self._chosen = params.text, params.chosen

    def __call__(self, logits: F32, seen: Sequence[int]) -> int:
        own, token = super().__call__(logits, seen), self._text[len(seen)]
        self._chosen(token, own)
        return token


@sampler_of.register
def _(params: Following, prompt: int = 0) -> Sampler:
    return Follower(params)
