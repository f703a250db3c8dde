"""Requests as lm-evaluation-harness sends them (local-completions) return the scores of the model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling import token_logprobs

COUNTRIES, CAPITALS = ("Peru", "Kenya", "Japan"), ("Lima", "Nairobi", "Tokyo")
CHOICES = [
    (f"The capital of {country} is", f" {capital}") for country in COUNTRIES for capital in CAPITALS
]
TEXTS = [
    ("The", " capital of Peru is Lima. It is a country in South America."),
    ("Spain", " borders France."),
]


def scores(
    client: TestClient, prompts: list[list[int]], context: list[int]
) -> Iterator[tuple[float, bool]]:
    """Ask as the harness does, and read the answer as it does."""
    body = {"prompt": prompts, "max_tokens": 1, "temperature": 0, "logprobs": 1, "seed": 1234}
    choices = client.post("/v1/completions", json=body | {"echo": True}).json()["choices"]
    for choice, before in zip(choices, context, strict=True):
        found = choice["logprobs"]
        own = found["token_logprobs"][before:-1]
        best = [max(top.values()) for top in found["top_logprobs"][before:-1]]
        yield sum(own), own == best


def score(model: Model, context: list[int], rest: list[int]) -> tuple[float, bool]:
    logits = model.logits([*context, *rest][:-1])[-len(rest) :]
    found = [token_logprobs(*each, 1) for each in zip(logits, rest, strict=True)]
    return sum(one.logprob for one in found), all(one.top[0][0] == one.token_id for one in found)


@pytest.mark.parametrize("texts", [CHOICES, TEXTS], ids=["choices", "texts"])
def test_scores_are_those_of_the_model(
    client: TestClient, model: Model, texts: list[tuple[str, str]]
) -> None:
    pairs = [
        (model.tokenize(context), model.tokenize(rest, add_special_tokens=False))
        for context, rest in texts
    ]
    expected = [score(model, *pair) for pair in pairs]
    prompts = [[*context, *rest] for context, rest in pairs]
    found = list(scores(client, prompts, [len(context) for context, _ in pairs]))
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [score for score, _ in found] == pytest.approx(
        [score for score, _ in expected], abs=1e-5
    )


def test_the_right_capital_scores_highest(client: TestClient, model: Model) -> None:
    pairs = [(model.tokenize(a), model.tokenize(b, add_special_tokens=False)) for a, b in CHOICES]
    prompts = [[*context, *rest] for context, rest in pairs]
    found = list(scores(client, prompts, [len(context) for context, _ in pairs]))
    for number, start in enumerate(range(0, len(found), len(CAPITALS))):
        choices = found[start : start + len(CAPITALS)]
        assert max(choices) == choices[number] == (choices[number][0], True)
