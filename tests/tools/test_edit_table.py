"""tools/demo/edit_table.py and its counts, with the demo model."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import edit_table
import pytest
from demo_facts import NAMING, Country, countries
from edit_cases import (
    CAPITAL,
    LENGTHS,
    Question,
    Unedited,
    ask,
    bare,
    name_tokens,
    pairs_of,
)
from edit_table import schemes_for
from installed import DEMO

import stem_edge
from stem_edge import Model, make_edit

KNOWN = {country.name: country for country in countries()}
SPAIN, GERMANY = KNOWN["Spain"], KNOWN["Germany"]


@pytest.fixture
def demo() -> Iterator[Model]:
    with stem_edge.load(DEMO, context_length=64) as model:
        yield model


def capital(country: Country) -> Question:
    return Question(country, "capital", CAPITAL)


def few(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr("edit_cases.countries", lambda: [KNOWN[name] for name in names])


def test_pairs_are_of_their_length_case(demo: Model) -> None:
    every = pairs_of(demo, None, seed=1)
    assert len({pair[:2] for pair in every}) == len(every) == len(KNOWN) * (len(KNOWN) - 1)
    for source, target, lengths in every[::500]:
        ours, theirs = len(name_tokens(demo, source)), len(name_tokens(demo, target))
        assert lengths == LENGTHS[(ours > theirs) - (ours < theirs)]
    some = pairs_of(demo, 7, seed=1)
    assert [pair.lengths for pair in some] == [name for name in LENGTHS.values() for _ in range(7)]
    assert some == pairs_of(demo, 7, seed=1) != pairs_of(demo, 7, seed=2)


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
    assert Unedited(demo).flip(capital(SPAIN), GERMANY, edit) == outcome
    assert ask(demo, "The capital of Spain is") == " Madrid."


def test_only_facts_that_differ_and_are_known_count(
    demo: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    unedited = Unedited(demo)
    assert unedited.can_flip(capital(SPAIN), GERMANY)
    euro = Question(SPAIN, "currency", NAMING["currency"][0])
    assert not unedited.can_flip(euro, GERMANY)
    atlantis = Country("Atlantis", "Poseidonis", "Europe", "Greek", "drachma", ())
    assert not unedited.can_flip(capital(atlantis), GERMANY)
    monkeypatch.setattr("edit_cases.ask", lambda *_: pytest.fail("asked twice"))
    assert unedited.knows(capital(SPAIN))


@pytest.mark.parametrize(
    ("sign", "expected"),
    [
        (0, {"swap", "average"}),
        (1, {"pad-left", "pad-right", "copy", "average"}),
        (-1, {"subset", "average"}),
    ],
)
def test_schemes_of_a_length_case(demo: Model, sign: int, expected: set[str]) -> None:
    pair = next(pair for pair in pairs_of(demo, 3, 1) if pair.lengths == LENGTHS[sign])
    assert set(schemes_for(pair.lengths)) == expected
    for scheme in schemes_for(pair.lengths):
        make_edit(demo.bundle, bare(pair.source), bare(pair.target), scheme=scheme)


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
