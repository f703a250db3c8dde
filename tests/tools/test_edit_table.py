"""tools/demo/edit_table.py and its counts, with the demo model."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import edit_table
import pytest
from demo_facts import countries
from edit_cases import LENGTHS, Pair, Unedited, ask
from installed import DEMO

import stem_edge
from stem_edge import Model, make_edit

KNOWN = {country.name: country for country in countries()}
PAIR = Pair(KNOWN["Spain"], KNOWN["Germany"], LENGTHS[0])


@pytest.fixture
def demo() -> Iterator[Model]:
    with stem_edge.load(DEMO, context_length=64) as model:
        yield model


def few(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr("edit_cases.countries", lambda: [KNOWN[name] for name in names])


@pytest.mark.parametrize(
    ("target", "layers", "outcome"),
    [
        ("Germany", None, "target"),
        ("Germany", [1, 3], "target"),
        ("Germany", [5], "source"),
        ("France", None, "neither"),
    ],
)
def test_an_outcome_says_whose_answer_it_is(
    demo: Model, target: str, layers: list[int] | None, outcome: str
) -> None:
    edit = make_edit(demo.bundle, "Spain", target, layers=layers)
    assert Unedited(demo).flip(PAIR, edit) == outcome
    assert ask(demo, "The capital of Spain is") == " Madrid."


def test_only_facts_that_differ_and_are_known_count(
    demo: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    unedited = Unedited(demo)
    assert unedited.can_flip(PAIR)
    assert not unedited.can_flip(PAIR._replace(target=PAIR.source))
    atlantis = PAIR.source._replace(name="Atlantis", capital="Poseidonis")
    assert not unedited.can_flip(PAIR._replace(source=atlantis))
    monkeypatch.setattr("edit_cases.ask", lambda *_: pytest.fail("asked twice"))
    assert unedited.knows(PAIR.source)


@pytest.mark.slow
def test_the_tool_prints_its_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few(monkeypatch, "Spain", "Germany", "Japan", "New Zealand")
    monkeypatch.setattr(sys, "argv", ["edit_table.py", "--pairs", "1"])
    edit_table.main()
    printed = capsys.readouterr().out
    assert "| swap | positions | 100.0 / 0.0 / 0.0" in printed
    assert "| 5 | 0.0 / 100.0 / 0.0 |" in printed
