"""Loading a model that drafts: how many tokens, by a clock that says that it pays, and its memory."""

from __future__ import annotations

from typing import Any

import pytest
from guessing import Shorter
from installed import DEMO
from threads import run_script

import stem_edge

PROMPTS = ("Once upon a time", "The capital of France is", "one two three one two three one")


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 0),  # not prepared, so nothing is known
        ({"speculate": False}, 0),
        ({"speculate": 0}, 0),
        ({"speculate": True}, 7),
        ({"speculate": 1}, 1),
        ({"speculate": 6}, 3),
        ({"speculate": 100}, 7),
        ({"speculate": True, "slots": 6}, 0),  # too few to measure
        ({"draft": DEMO}, 7),
        ({"draft": DEMO, "speculate": 1}, 1),
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


def test_a_model_drafts_for_answers_and_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(**options: Any) -> tuple[list[str], float]:
        with stem_edge.load(DEMO, threads=1, **options) as model:
            found = [model.generate_text(prompt, max_new_tokens=40) for prompt in PROMPTS]
            talk = model.conversation()
            for question in ("Who are you? ", "And what is the capital of Spain? "):
                found += [chunk.text for chunk in talk.send(question, max_new_tokens=20)]
            right = model.stats.accepted_tokens / max(1, model.stats.drafted_tokens)
            sampled = {"max_new_tokens": 60, "temperature": 2.0, "seed": 1}
            return ["".join(found), model.generate_text(PROMPTS[0], **sampled)], right  # type: ignore[arg-type]

    expected = answers()[0]
    Shorter(monkeypatch)
    found, right = answers(draft=DEMO)
    assert found == expected and right > 0.5


# Prints the memory of a process that generated, and how much of it the plan has for all but the model.
MEMORY = """
import sys, stem_edge
from stem_edge.system.memory import own_memory
demo, draft = sys.argv[1], sys.argv[2] or None
options = {"slots": 300, "threads": 1, "context_length": 256, "draft": draft}
memory = stem_edge.memory_plan(demo, **options).total + 2_000_000
with stem_edge.load(demo, memory=memory, speculate=bool(draft), **options) as model:
    model.generate_text("The capital of France is", max_new_tokens=30)
    print(own_memory(), model.plan.process)
"""


def test_it_takes_no_more_memory_than_the_plan_has_for_it() -> None:
    """Compare processes with it and without."""
    alone, both = (
        [int(word) for word in done.stdout.split()]
        for done in (run_script(MEMORY, DEMO, draft) for draft in ("", DEMO))
    )
    assert 1_000_000 < both[0] - alone[0] <= both[1] - alone[1]
