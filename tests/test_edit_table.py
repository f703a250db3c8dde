"""tools/edit_table.py and what it counts, on the model in the package."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import edit_table
import pytest
from conftest import DEMO
from demo_facts import NAMING, Country, countries
from edit_cases import (
    CAPITAL,
    LENGTHS,
    Pair,
    Question,
    Tally,
    Unedited,
    about_others,
    answers,
    ask,
    bare,
    name_tokens,
    pairs_of,
    probability_of,
    schemes_for,
)
from edit_collateral import changes, two_countries
from edit_table import Reversal, cell, subsets_of

import stem_edge
from stem_edge import Model, make_edit

KNOWN = {country.name: country for country in countries()}
SPAIN, GERMANY, FRANCE = KNOWN["Spain"], KNOWN["Germany"], KNOWN["France"]


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


def test_an_answer_ends_with_its_full_stop(demo: Model) -> None:
    found = ask(demo, "The capital of Spain is")
    assert (found.text, demo.detokenize(found.token_ids)) == (" Madrid.", " Madrid.")
    again = probability_of(demo, "The capital of Spain is", found.token_ids)
    assert 0.5 < found.probability == pytest.approx(again, abs=0.02)


@pytest.mark.parametrize(
    ("layers", "outcome"), [(None, "target"), ([1, 3], "target"), ([5], "source")]
)
def test_an_outcome_says_whose_answer_it_is(
    demo: Model, layers: list[int] | None, outcome: str
) -> None:
    edit = make_edit(demo.bundle, "Spain", "Germany", layers=layers)
    found, probability = Unedited(demo).flip(capital(SPAIN), GERMANY, edit)
    assert found == outcome
    assert (probability > 0.5) == (outcome == "target")
    assert ask(demo, "The capital of Spain is").text == " Madrid."


def test_an_answer_that_is_nobodys_is_neither(demo: Model) -> None:
    edit = make_edit(demo.bundle, "Spain", "France")
    found, probability = Unedited(demo).flip(capital(SPAIN), GERMANY, edit)
    assert found == "neither"
    assert probability < 0.1


def test_only_facts_that_differ_and_are_known_count(
    demo: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    unedited = Unedited(demo)
    currency, borders = NAMING["currency"][0], NAMING["neighbours"][-1]
    assert unedited.can_flip(capital(SPAIN), GERMANY)
    assert not unedited.can_flip(Question(SPAIN, "currency", currency), GERMANY)  # both the euro
    assert not unedited.can_flip(Question(SPAIN, "neighbours", borders), GERMANY)  # both France
    assert not unedited.can_flip(Question(KNOWN["Malta"], "neighbours", borders), GERMANY)
    atlantis = Country("Atlantis", "Poseidonis", "Europe", "Greek", "drachma", ())
    assert not unedited.can_flip(capital(atlantis), GERMANY)
    monkeypatch.setattr("edit_cases.ask", lambda *_: pytest.fail("asked twice"))
    assert unedited.knows(capital(SPAIN))


def test_a_right_answer_names_true_neighbours() -> None:
    question = Question(SPAIN, "neighbours", NAMING["neighbours"][0])
    assert answers(" Portugal and France.", question)
    assert not answers(" Portugal and Germany.", question)


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


def test_subsets_are_as_many_tokens_as_the_source_has(demo: Model) -> None:
    target = KNOWN["the Central African Republic"]
    length = len(name_tokens(demo, target))
    assert length > 2
    found = subsets_of(demo, Pair(SPAIN, target, LENGTHS[-1]))
    ids = name_tokens(demo, target)
    assert (found["first tokens"], found["last tokens"]) == ([0], [length - 1])
    assert ids[found["rarest tokens"][0]] == max(ids)
    texts = [demo.detokenize([token]) for token in ids]
    assert texts[found["most letters"][0]] == max(texts, key=len)


@pytest.mark.slow
def test_collateral_is_what_asking_every_question_finds(
    demo: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    few(monkeypatch, "South Sudan", "North Korea", "Canada", "Spain", "Germany")
    edit = make_edit(demo.bundle, "North Korea", "Spain", scope="everywhere")
    unedited = Unedited(demo)
    found = changes(unedited, edit, "North Korea")
    asked = about_others("North Korea")
    assert all(question.country.name != "North Korea" for question in asked)
    before = [unedited.answer(question).token_ids for question in asked]
    with demo.edited(edit):
        after = [ask(demo, question.prompt).token_ids for question in asked]
    changed = [q for q, a, b in zip(asked, before, after, strict=True) if a != b]
    assert found.changed.total() == len(changed) > 0  # Canada lies in " North America"
    assert found.changed["continent"] == sum(q.fact == "continent" for q in changed)
    assert found.names["North Korea", "Canada"] == sum(q.country.name == "Canada" for q in changed)
    assert found.asked.total() == len(asked) > found.touched.total() >= len(changed)
    assert found.share(["continent"]) == found.changed["continent"] / found.asked["continent"]


def test_another_country_in_the_same_prompt_stays(demo: Model) -> None:
    pairs = [Pair(SPAIN, GERMANY, LENGTHS[0]), Pair(FRANCE, SPAIN, LENGTHS[0])]
    found = list(two_countries(Unedited(demo), pairs, seed=1))
    assert found == [(pair, True, True) for pair in pairs]


def test_a_reversal_is_of_every_bit(demo: Model) -> None:
    reversal = Reversal(demo)
    reversal.keep("The capital of Spain is")
    with demo.edited(make_edit(demo.bundle, "Spain", "Germany", layers=[5])):
        reversal.check("The capital of Spain is")
    assert (reversal.checked, reversal.equal) == (1, 0)
    reversal.check("The capital of Spain is")
    assert (reversal.checked, reversal.equal) == (2, 1)


def test_a_cell_has_the_shares_of_all_outcomes() -> None:
    found = Tally()
    for outcome, probability in (("target", 0.9), ("source", 0.1), ("neither", 0.2)):
        found.add(outcome, probability)
    found.add("target", 0.8)
    assert cell(found) == "50.0 / 25.0 / 25.0; 0.50"


@pytest.mark.slow
def test_the_tool_prints_what_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few(monkeypatch, "Spain", "Germany", "Japan", "New Zealand")
    monkeypatch.setattr("edit_collateral.countries", lambda: list(KNOWN.values())[:20])
    out = tmp_path / "table.json"
    given = ["--pairs", "1", "--edits", "1", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["edit_table.py", *given])
    edit_table.main()
    printed, report = capsys.readouterr().out, json.loads(out.read_text())
    assert "| swap | positions | 100.0 / 0.0 / 0.0" in printed
    swap = next(row for row in report["schemes"] if row["labels"] == ["swap", "positions"])
    assert (swap["cases"], swap["target"], swap["source"]) == (1, 1, 0)
    assert {row["lengths"] for row in report["layers"]} == set(LENGTHS.values())
    assert report["collateral"]["n_s > n_t"]["edits"] == 1
    assert report["reversal"]["checked"] == report["reversal"]["equal"] > 20
