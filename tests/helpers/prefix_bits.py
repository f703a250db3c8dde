"""Logits of prompts that go on from kept prefixes, beside those of fresh contexts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stem_edge.numerics.quantize import F32
from stem_edge.runtime import Model
from stem_edge.runtime.lookups.lookups import StemId

ANSWER = 3  # tokens decoded after each prompt, which no later prompt may take over


class Outcome(NamedTuple):
    """Logits [V] after a prompt, and how many of its tokens were not computed for them."""

    logits: F32
    cached: int


def after_prompt(
    model: Model,
    ids: Sequence[int],
    stem_ids: Sequence[StemId] | None = None,
    *,
    answer: int = ANSWER,
    fresh: bool = False,
) -> Outcome:
    """Process a prompt as Model.generate does, and decode some tokens after it."""
    engine, lookups, length = (
        model.engine,
        model._lookups(list(ids), stem_ids),
        len(ids) + answer,
    )
    with lookups:
        if fresh:
            context = engine.open_context(length)
            *_, logits = engine.process(context, ids, lookups.prompt)
            return Outcome(logits[0].copy(), 0)
        with model._prefixes.lent(list(ids), lookups.places, length) as context:
            cached = context.position
            *_, logits = engine.process(context, ids, lookups.prompt, computed=cached)
            found = logits[0].copy()
            for token in range(answer):
                engine.step(context, np.array([token]))
            return Outcome(found, cached)


def check_bits(model: Model, prompts: Sequence[Sequence[int]]) -> int:
    """Compare each prompt, in turn, with a fresh call; return the tokens that were taken over."""
    taken = 0
    for ids in prompts:
        expected = after_prompt(model, ids, fresh=True).logits
        found = after_prompt(model, ids)
        assert (found.logits == expected).all(), (len(ids), found.cached)
        taken += found.cached
    return taken
