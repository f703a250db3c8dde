"""Loading a model that drafts: how many tokens, by a clock that says that it pays."""

from __future__ import annotations

from typing import Any

import pytest
from guessing import Shorter
from installed import DEMO

import stem_edge


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 0),  # not prepared, so nothing is known
        ({"speculate": False}, 0),
        ({"speculate": 0}, 0),
        ({"speculate": True}, 7),
        ({"speculate": 1}, 1),
        ({"speculate": 6}, 3),
        ({"speculate": 7}, 7),
        ({"speculate": True, "slots": 6}, 0),  # too few to measure
    ],
)
def test_how_many_tokens_are_drafted(
    options: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Shorter(monkeypatch)
    with stem_edge.load(DEMO, threads=1, **options) as model:
        model.generate_text(
            "Once", max_new_tokens=40, logit_bias={300: 100}
        )  # 300, again and again
        stats = model.stats
        assert bool(stats.drafted_tokens) == bool(most)
        assert stats.drafted_tokens <= most * stats.decode_steps
        assert stats.drafted_tokens >= most * stats.decode_steps / 2
