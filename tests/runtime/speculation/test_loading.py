"""Loading a model that guesses, with what it measures and the model that helps it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from guessing import CHEAP
from installed import DEMO
from threads import run_script

import stem_edge
from stem_edge.errors import BackendError, InputError, MemoryPlanError
from stem_edge.runtime import Model, load_plan
from stem_edge.runtime.backends.interface import StepCosts
from stem_edge.runtime.backends.onnxruntime.loader import OrtLoader
from stem_edge.runtime.engine import Engine
from stem_edge.runtime.speculation import opening
from stem_edge.runtime.speculation.model_drafts import Drafter
from stem_edge.runtime.speculation.speculation import Speculation

PROMPTS = ("Once upon a time", "The capital of France is", "one two three one two three one")


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, None),  # not prepared, so nothing is known
        ({"speculate": False}, None),
        ({"speculate": 0}, None),
        ({"speculate": True}, 7),
        ({"speculate": 1}, 1),
        ({"speculate": 6}, 3),
        ({"speculate": 100}, 7),
        ({"speculate": True, "context_length": 8}, None),  # too short to measure
        ({"speculate": True, "slots": 6}, None),
    ],
)
def test_who_speculates(options: dict[str, Any], most: int | None) -> None:
    with stem_edge.load(DEMO, threads=1, **options) as model:
        found = model.stepping.speculation
        assert (found.most if found is not None else None) == most


@pytest.mark.parametrize("same_bits", [True, False])
@pytest.mark.parametrize("exact", [True, False])
def test_exact_needs_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, exact: bool, same_bits: bool
) -> None:
    costs = StepCosts(seconds=0.01, times={2: 1.0}, same_bits=same_bits)
    monkeypatch.setattr(opening, "measured", lambda *_: costs)
    with stem_edge.load(DEMO, threads=1, speculate=True, exact=exact) as model:
        assert (model.stepping.speculation is not None) == (same_bits or not exact)


@pytest.mark.parametrize("same_bits", [True, False])
@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, False),
        ({"exact": True}, False),
        ({"speculate": True}, True),
        ({"speculate": 3}, True),
        ({"draft": DEMO}, True),
    ],
)
def test_guesses_that_may_change_answers_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    asked: bool,
    same_bits: bool,
) -> None:
    costs = StepCosts(seconds=0.01, times={2: 1.0}, same_bits=same_bits)
    monkeypatch.setattr(OrtLoader, "step_costs", property(lambda _: costs))
    monkeypatch.setattr(opening, "measured", lambda *_: costs)
    with stem_edge.load(DEMO, threads=1, **options) as model:
        assert (model.stepping.speculation is not None) == (asked or same_bits)


def test_measuring_counts_few_tokens_as_used() -> None:
    with stem_edge.load(DEMO, threads=1, speculate=True) as model:
        assert model.engine.rows.counters().hits + model.engine.rows.counters().misses == 8


def test_steps_that_fail_close_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = list[Engine]()
    real = Engine.close

    def close(engine: Engine) -> None:
        closed.append(engine)
        real(engine)

    def failing(*_: object) -> None:
        raise BackendError("broken")

    monkeypatch.setattr(Engine, "close", close)
    monkeypatch.setattr(opening, "measured", failing)
    with pytest.raises(BackendError, match="broken"):
        stem_edge.load(DEMO, threads=1, speculate=True)
    assert len(closed) == 1


def drafter_of(model: Model) -> Drafter:
    """Return the smaller model that a model speculates with."""
    assert model.stepping.speculation is not None
    (source,) = model.stepping.speculation.sources
    assert isinstance(source, Drafter)
    return source


@pytest.fixture
def helped() -> Iterator[Model]:
    """The demo, with itself as the smaller model, where every guess is worth its time."""
    with stem_edge.load(DEMO, threads=1, draft=DEMO) as model:
        model.speculate(Speculation(CHEAP, 7, [drafter_of(model)._replace(seconds=1e-6)]))
        yield model


def test_a_model_drafts(helped: Model) -> None:
    with stem_edge.load(DEMO, threads=1) as plain:
        for prompt in PROMPTS:
            text = plain.generate_text(prompt, max_new_tokens=40)
            assert helped.generate_text(prompt, max_new_tokens=40) == text
    assert helped.stats.accepted_tokens > helped.stats.drafted_tokens / 2 > 0
    assert "guesses right" in helped.stats.line()


def test_its_memory_is_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_plan, "own_memory", lambda: 100_000_000)
    limit, slots = 200_000_000, 300
    alone = stem_edge.memory_plan(DEMO, limit, slots=slots, threads=1)
    both = stem_edge.memory_plan(DEMO, limit, slots=slots, threads=1, draft=DEMO)
    smaller = stem_edge.memory_plan(DEMO, slots=1024, threads=1)
    taken = smaller.total - smaller.process
    assert both.process - alone.process == taken
    with pytest.raises(MemoryPlanError):
        stem_edge.memory_plan(DEMO, alone.total + taken // 4, slots=slots, threads=1, draft=DEMO)


# Prints the memory of a process that generated, and how much of it the plan has for all but the model.
MEMORY = """
import sys, stem_edge
from stem_edge.system.memory import own_memory
demo, draft = sys.argv[1], sys.argv[2] or None
options = {"slots": 300, "threads": 1, "context_length": 256, "draft": draft}
memory = stem_edge.memory_plan(demo, **options).total + 2_000_000
with stem_edge.load(demo, memory=memory, speculate=bool(draft), **options) as model:
    model.generate_text("The capital of France is", max_new_tokens=30)
    assert (model.stepping.speculation is not None) == bool(draft)
    print(own_memory(), model.plan.process)
"""


def test_it_takes_no_more_memory_than_the_plan_has_for_it() -> None:
    """Compare processes with it and without."""
    alone, both = (
        [int(word) for word in done.stdout.split()]
        for done in (run_script(MEMORY, DEMO, draft) for draft in ("", DEMO))
    )
    assert 1_000_000 < both[0] - alone[0] <= both[1] - alone[1]


def test_it_goes_on_with_later_turns(helped: Model) -> None:
    with stem_edge.load(DEMO, threads=1) as plain:
        talks = [model.conversation() for model in (plain, helped)]
        for question in ("Who are you? ", "And what is the capital of Spain? "):
            answers = [
                "".join(chunk.text for chunk in talk.send(question, max_new_tokens=20))
                for talk in talks
            ]
            assert answers[0] == answers[1]


def test_an_answer_goes_on_without_it_when_it_fails(
    helped: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = helped.generate_text(PROMPTS[0])
    drafter_of(helped).close()
    assert helped.generate_text(PROMPTS[0]) == expected


def test_texts_beyond_its_context_have_no_drafts_of_it() -> None:
    with stem_edge.load(DEMO, threads=1) as plain:
        expected = plain.generate_text(PROMPTS[0], max_new_tokens=60, temperature=2.0, seed=1)
    with stem_edge.load(DEMO, threads=1, draft=DEMO) as model:
        short = drafter_of(model)._replace(seconds=1e-6, context_length=20)
        model.speculate(Speculation(CHEAP, 7, [short]))
        assert (
            model.generate_text(PROMPTS[0], max_new_tokens=60, temperature=2.0, seed=1) == expected
        )


def test_another_tokenizer_is_refused(tiny_bundle: Path) -> None:
    with pytest.raises(InputError, match=r"tiny: has another tokenizer than .*demo_model"):
        stem_edge.load(DEMO, threads=1, draft=tiny_bundle)


def test_it_is_closed_with_the_model() -> None:
    model = stem_edge.load(DEMO, threads=1, draft=DEMO)
    smaller = drafter_of(model).engine
    model.close()
    with pytest.raises(InputError, match="closed"):
        smaller.step(None, np.zeros(1, np.int64))  # type: ignore[arg-type]
