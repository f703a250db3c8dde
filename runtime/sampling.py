"""Chooses the next token from logits, as SamplingParams say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stem_edge.numerics.quantize import F32
from stem_edge.runtime.sampling_params import SamplingParams

Change = Callable[[F32, Sequence[int]], None]  # (logits, token ids so far): changes the logits


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of token probabilities in one step, before temperature and filters."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the most probable (token id, logprob), best first


class Sampler:
    """Chooses the tokens of one answer. Takes one random number per token, unless it is greedy.

    prompt: number of prompt tokens, which come first in the token ids that each call gets.
    """

    def __init__(self, params: SamplingParams, prompt: int = 0) -> None:
        self._params, self._changes = params.resolved(), _changes(params, prompt)

    @cached_property
    def _generator(self) -> np.random.Generator:
        return np.random.default_rng(self._params.seed)

    def __call__(self, logits: F32, seen: Sequence[int]) -> int:
        """Return the next token. seen: ids of prompt and answer. May change logits [V] in place."""
        for change in self._changes:
            change(logits, seen)
        if self._params.temperature == 0:
            return int(logits.argmax())
        from stem_edge.numerics.logits import candidates  # greedy answers need none

        given = self._params
        ids, probabilities = candidates(
            logits, given.temperature or 0.0, given.top_k, given.top_p, given.min_p
        )
        # Draw one uniform number per token, whatever the filters keep, so that seeds stay in step.
        sums = np.cumsum(probabilities)
        return int(ids[np.searchsorted(sums, self._generator.random() * sums[-1], side="right")])

    def skip(self) -> None:
        """Consume one random number for a token that was chosen without the sampler."""
        self._generator.random()


def _changes(params: SamplingParams, prompt: int) -> list[Change]:
    """Return functions that apply penalties and biases. prompt: number of prompt tokens."""
    found = list[Change]()
    penalty = params.repetition_penalty or 1.0  # it is never 0
    presence, frequency = params.presence_penalty, params.frequency_penalty
    if penalty != 1:
        from stem_edge.numerics.logits import apply_repetition_penalty

        found.append(lambda logits, seen: apply_repetition_penalty(logits, seen, penalty))
    if presence or frequency:
        from stem_edge.numerics.logits import apply_penalties

        found.append(
            lambda logits, seen: apply_penalties(logits, seen[prompt:], presence, frequency)
        )
    if params.logit_bias:
        ids, added = params.biases

        def add(logits: F32, seen: Sequence[int]) -> None:
            logits[ids] += added

        found.append(add)
    return found


def token_logprobs(logits: F32, token_id: int, count: int) -> TokenLogprobs:
    """Return log probabilities of the chosen token and of the `count` most probable tokens."""
    from stem_edge.numerics.logits import top_ids

    peak = logits.max()
    log_total = float(peak) + float(np.log(np.exp(logits - peak).sum(dtype=np.float64)))
    top = tuple((int(i), float(logits[i]) - log_total) for i in top_ids(logits, count))
    return TokenLogprobs(token_id, float(logits[token_id]) - log_total, top)
