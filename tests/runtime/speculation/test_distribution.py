"""Sampling with guesses has the model's distribution: many answers of a tiny one are counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from stem_edge.numerics.quantize import F32
from stem_edge.runtime.decoding import sample_tokens
from stem_edge.runtime.engine import Guesses
from stem_edge.runtime.generation import Answer
from stem_edge.runtime.rows.prefetch import Rows
from stem_edge.runtime.sampling_params import SamplingParams
from stem_edge.runtime.stats import GenerationStats, Recorder

V, TOKENS, ANSWERS = 5, 3, 3000
# Logits of the next token after each token.
NEXT = np.random.default_rng(1).normal(0, 1.2, (V, V)).astype(np.float32)
LIKELY = NEXT.argmax(axis=1).tolist()


class TinyEngine:
    """Engine, context and lookups of a model whose next token follows from the one before."""

    logit_tokens, position, length = 8, 0, 1 + TOKENS - 1

    @property
    def prompt(self) -> Any:
        return np.zeros(1, np.int64)

    @property
    def room(self) -> int:
        return self.length - self.position

    together = room

    def rewind(self, position: int) -> None:
        self.position = position

    def after(self, seen: Sequence[int], drafts: Sequence[int]) -> Any:
        return np.array([seen[-1], *drafts])

    def expect(self, stem_ids: Any, logits: int) -> None:
        pass

    def process(self, context: Any, prompt: Any, *_: Any, **__: Any) -> list[F32]:
        self.position = len(prompt)
        return [NEXT[[prompt[-1]]]]

    def step(self, context: Any, token_ids: Any, logits: int, **_: Any) -> F32:
        self.position += len(token_ids)
        assert len(token_ids) == logits and self.room >= 0
        found: F32 = NEXT[token_ids]
        return found


class LikelyGuesses(Guesses):
    """Always the most probable tokens."""

    def after(self, seen: Any, room: int) -> list[int]:
        found = list(seen[-1:])
        while len(found) <= room:
            found.append(LIKELY[found[-1]])
        return found[1:]


def answer(seed: int, guesses: Guesses, temperature: float) -> tuple[int, ...]:
    tiny: Any = TinyEngine()
    params = SamplingParams(temperature=temperature, seed=seed)
    record = Recorder(GenerationStats(), Rows())
    sampled = sample_tokens(tiny, tiny, Answer([0], params, ()), tiny, record, guesses)
    return tuple(one.token_id for one in sampled)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_answers_are_as_frequent_as_the_model_says(temperature: float) -> None:
    found = [answer(seed, LikelyGuesses(), temperature) for seed in range(ANSWERS)]
    assert found[:200] == [answer(seed, Guesses(), temperature) for seed in range(200)]
    weights = np.exp(NEXT.astype(np.float64) / temperature)
    chances = weights / weights.sum(axis=1, keepdims=True)
    expected = chances[0][:, None, None] * chances[:, :, None] * chances[None]
    counts = np.zeros((V, V, V))
    np.add.at(counts, tuple(np.array(found).T), 1)
    # Answers rarer than 5 are counted together, as Pearson's test needs.
    rare = expected * ANSWERS < 5
    pairs = [(counts[rare].sum(), expected[rare].sum() * ANSWERS)]
    pairs += zip(counts[~rare], expected[~rare] * ANSWERS, strict=True)
    kinds = len(pairs) - 1
    chi_square = sum((seen - wanted) ** 2 / wanted for seen, wanted in pairs)
    assert kinds > 30
    # Four standard deviations; taking each guess as it is exceeds it thirtyfold.
    assert chi_square < kinds + 4 * np.sqrt(2 * kinds)
