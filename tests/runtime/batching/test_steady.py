"""Sequences that join the batch even where they run alone, so that no token tells how many run."""

from __future__ import annotations

from typing import Any

import pytest
from tiers import slow_but
from toy_batches import alone

from stem_edge.runtime.model import Model

Toy = tuple[Model, Any]
TOY = {"slots": 16, "sequences": 12}
PROMPTS = [[97, number] for number in range(6, 15)]


def run(model: Model, size: int) -> list[list[int]]:
    """Return the tokens of answers of many lengths."""
    scheduler = model.scheduler(size, steady=True)
    requests = [model.request(p, max_new_tokens=2 + n) for n, p in enumerate(PROMPTS)]
    for request in requests:
        scheduler.submit(request)
    while scheduler.busy:
        scheduler.step()
    scheduler.close()
    return [request.answer.seen[2:] for request in requests]


@pytest.mark.parametrize("size", slow_but([2, 5], [2, 3, 4, 5]))
def test_tokens_are_right(toy: Toy, size: int) -> None:
    model, backend = toy
    whole = alone(model, PROMPTS, max_new_tokens=20)
    backend.units.clear()
    assert run(model, size) == [ids[: 2 + n] for n, ids in enumerate(whole)]
    if backend.copies:  # else each token of a sequence is a step of its own
        steps = [len(ids) for ids, positions in backend.units if len(ids) == len(positions)]
        assert max(steps) == size
