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
