"""Requests through a scheduler, and Ctrl-C within a step, where Python can drop what is raised."""

from __future__ import annotations

import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from servers import before_steps

from stem_edge.apps.batches.answering import Settings, answer
from stem_edge.apps.batches.rows import Row
from stem_edge.runtime.model import Model
from stem_edge.runtime.scheduling.many import interrupts_held


class Thing:
    """Something to refer to."""


def ctrl_c() -> None:
    """Send the signal, as a terminal does; its handler has run when this returns."""
    signal.raise_signal(signal.SIGINT)


def ctrl_c_in_a_callback() -> None:
    """Send it while a weak reference tells that its object goes, as weak sets do."""
    thing = Thing()
    gone = weakref.ref(thing, lambda _: ctrl_c())
    del thing
    assert gone() is None


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where the tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.mark.parametrize("send", [ctrl_c, ctrl_c_in_a_callback])
def test_the_first_waits_for_the_end(send: Callable[[], None]) -> None:
    reached = list[int]()
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        send()
        reached.append(1)
    assert reached == [1]


def test_the_second_does_not_wait() -> None:
    reached = list[int]()
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        ctrl_c()
        reached.append(1)
        ctrl_c()
        reached.append(2)
    assert reached == [1]


ROWS = [Row(line, line, {"prompt": "Cuba lies in"}) for line in range(1, 1000)]
RUNS = [
    lambda model: answer(model, ROWS, Settings({"max_new_tokens": 6})),
    lambda model: model.generate_many(["Cuba lies in"] * 999, max_new_tokens=6),
]


@pytest.mark.parametrize("begun", RUNS, ids=["batch", "generate_many"])
def test_a_run_ends_after_the_step_in_which_it_came(
    begun: Callable[[Model], Iterator[Any]], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = list[int]()

    def before() -> None:
        steps.append(len(steps))
        if len(steps) == 3:
            ctrl_c_in_a_callback()

    before_steps(monkeypatch, model, before)
    with pytest.raises(KeyboardInterrupt):
        list(begun(model))
    assert len(steps) == 3
