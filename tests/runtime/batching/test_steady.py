"""Steps of an even number of sequences, so that no token tells how many run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from installed import DEMO
from tiers import slow_but
from toy_batches import alone

import stem_edge
from stem_edge.runtime.batching.batch import Rounding, RunningBatch
from stem_edge.runtime.engine import Step
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
def test_tokens_are_right_and_steps_even(toy: Toy, size: int) -> None:
    model, backend = toy
    whole = alone(model, PROMPTS, max_new_tokens=20)
    backend.units.clear()
    assert run(model, size) == [ids[: 2 + n] for n, ids in enumerate(whole)]
    if backend.copies:  # otherwise each is a unit of its own
        steps = [len(ids) for ids, positions in backend.units if len(ids) == len(positions)]
        assert {count % 2 for count in steps} == {0}
        assert max(steps) == size + size % 2


def test_bits_do_not_tell_how_many_run() -> None:
    with stem_edge.load(DEMO) as model:
        engine, ids = model.engine, model.tokenize("The capital of Italy is")
        context = engine.open_context(64)
        for _ in engine.process(context, ids, np.array(ids)):
            pass
        batch = RunningBatch(engine, 5, 64, Rounding(steady=True))
        logits, token = [], np.array(ids[-1:])
        for count in (1, 2, 3, 4, 5):
            batch.join(context, len(ids))
            step = Step(token.repeat(count), token.repeat(count), count)
            logits += [line.copy() for line in batch.step(step, [len(ids)] * count)]
        batch.leave(0)
        assert batch.step(Step(token.repeat(4), token.repeat(4), 4), [len(ids)] * 4).shape[0] == 4
        assert len(logits) == 15
        assert all(np.array_equal(line, logits[0]) for line in logits)
        batch.close()
