"""Ways of computing logits and answers that must give the same."""

from __future__ import annotations

from typing import Any

from guessing import ToldSpeculation

from stem_edge.numerics.quantize import F32
from stem_edge.runtime import Model

NEW = 12


def at_once(model: Model, ids: list[int]) -> F32:
    return model.logits(ids)


Answers = dict[int, list[int]]


def in_turn(model: Model, texts: list[list[int]]) -> Answers:
    return {n: tokens(model.generate(text, max_new_tokens=NEW)) for n, text in enumerate(texts)}


def with_guesses(model: Model, texts: list[list[int]]) -> Answers:
    """Every third guess is wrong."""
    answers = in_turn(model, texts)
    for number, text in enumerate(texts):
        model.speculate(ToldSpeculation([*text, *answers[number]], 3))
        answers[number] = tokens(model.generate(text, max_new_tokens=NEW))
        assert model.stats.drafted_tokens > 0 or len(answers[number]) < 3
    return answers


def together(model: Model, texts: list[list[int]]) -> Answers:
    answers: Answers = {}
    for number, chunk in model.generate_many(texts, sequences=3, max_new_tokens=NEW):
        assert chunk.error is None
        answers.setdefault(number, []).extend(chunk.token_ids)
    return answers


def after_kept(model: Model, texts: list[list[int]]) -> Answers:
    answers: Answers = {}
    for number, text in enumerate(texts):
        tokens(model.generate([*text[:-3], 1, 2, 3], max_new_tokens=NEW))
        answers[number] = tokens(model.generate(text, max_new_tokens=NEW))
    assert model.stats.cached_tokens > 100  # of the last one
    return answers


def tokens(chunks: Any) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]
