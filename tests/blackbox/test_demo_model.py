"""The shipped demo knows as much as docs/results.md says."""

from __future__ import annotations

import pytest
from demo_facts import countries
from demo_text import Composer, is_right
from installed import DEMO

import stem_edge

SEED = 1  # seed of the shipped model, because the held-out combinations follow from it
HELD_OUT = Composer(countries(), SEED).prompts()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fact", "least"),
    [("capital", 0.95), ("continent", 0.95), ("language", 0.95), ("currency", 0.95)],
)
def test_held_out_facts(fact: str, least: float) -> None:
    prompts = [prompt for prompt in HELD_OUT if prompt.fact == fact]
    assert len(prompts) > 100
    with stem_edge.load(DEMO, context_length=64) as model:
        right = [is_right(p, model.generate_text(p.text, max_new_tokens=16)) for p in prompts]
    assert sum(right) >= least * len(prompts)


def test_the_shipped_bundle_is_whole() -> None:
    assert set(stem_edge.verify(DEMO).values()) == {"ok"}


def test_no_held_out_sentence_is_trained_on() -> None:
    composer = Composer(countries(), SEED)
    text = "\n".join(composer.training_documents(3000))
    named = [prompt for prompt in composer.prompts() if prompt.fact != "neighbours"]
    # Compare whole sentences, because "... Guinea" also begins "... Guinea-Bissau".
    assert not [p for p in named if f"{p.text} {getattr(p.country, p.fact)}." in text]


def test_the_same_seed_composes_the_same_text() -> None:
    texts = [Composer(countries(), seed).training_documents(50) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_names_and_capitals_are_there_once() -> None:
    names = [country.name for country in countries()]
    capitals = [country.capital for country in countries()]
    assert len(set(names)) == len(names) > 100
    assert len(set(capitals)) == len(capitals)
