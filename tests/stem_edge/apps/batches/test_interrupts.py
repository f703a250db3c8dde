"""Ctrl-C within a step of a batch: nothing of it goes on, and the model stays usable."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from servers import before_steps

from stem_edge.apps.batches.answering import Settings, answer
from stem_edge.apps.batches.rows import Row
from stem_edge.runtime.model import Model


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where the tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


ROWS = [Row(line, line, {"prompt": "Cuba lies in"}) for line in range(1, 1000)]
RUNS = [
    lambda model: answer(model, ROWS, Settings({"max_new_tokens": 6})),
    lambda model: model.generate_many(["Cuba lies in"] * 999, max_new_tokens=6),
]


@pytest.mark.parametrize("begun", RUNS, ids=["batch", "generate_many"])
def test_a_run_ends_in_the_step_in_which_it_comes(
    begun: Callable[[Model], Iterator[Any]], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, expected = list[int](), model.generate_text("Cuba lies in", max_new_tokens=6)

    def before() -> None:
        steps.append(len(steps))
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)

    before_steps(monkeypatch, model, before)
    with pytest.raises(KeyboardInterrupt):
        list(begun(model))
    assert len(steps) == 3
    assert model.generate_text("Cuba lies in", max_new_tokens=6) == expected
