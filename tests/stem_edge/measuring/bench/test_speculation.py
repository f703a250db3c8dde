"""`stem-edge bench --cases speculation` with the demo: measured and printed figures, never their values."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from installed import DEMO

from stem_edge.commands.main import main
from stem_edge.measuring.bench import speculation
from stem_edge.measuring.bench.bench import bench
from stem_edge.measuring.bench.cases import Key, Results, Seen, Spread
from stem_edge.measuring.bench.figures import Report
from stem_edge.measuring.bench.report import report_table
from stem_edge.measuring.bench.speculation import KINDS

QUICK: dict[str, Any] = {"prompt_tokens": 24, "new_tokens": 12, "rounds": 1, "threads": 1}


@pytest.fixture(scope="module")
def report() -> Report:
    return bench(DEMO, cases="speculation", speculate=True, **QUICK)


def test_every_kind_is_measured_with_and_without_guesses(report: Report) -> None:
    wanted = [(kind, way) for kind in KINDS for way in ("plain", "speculation")]
    assert [(one.case, one.way) for one in report.results] == wanted
    for plain, guessing in zip(report.results[::2], report.results[1::2], strict=True):
        assert plain.figures["drafted_per_token"] == plain.figures["different"] == 0
        assert plain.ratios["plain"] == Spread(1, 1, 1)
        assert guessing.ratios["plain"].median > 0
        assert guessing.figures.get("step_of_2", 1.0) >= 1  # a busy machine cannot measure it
        assert guessing.figures.get("accepted_share", 0) <= 1
    assert report.settings.context_length == 24 + 12
    assert json.loads(json.dumps(asdict(report)))["results"][0]["case"] == "copying"


def test_the_table(report: Report) -> None:
    text = report_table(report)
    assert "prompts of up to 24, answers of up to 12, 1 rounds; four kinds of text" in text
    measured = "step_of_2" in report.results[0].figures
    assert measured == ("bundle: steps of 2, 4, 8 tokens take " in text)
    for kind in KINDS:
        assert f"\n{kind} " in text


def test_answers_of_a_kind_are_added_up() -> None:
    first = {"seconds": 1.0, "drafted": 6, "accepted": 3, "step_of_2": 1.5}
    second = {"seconds": 3.0, "drafted": 2, "accepted": 1, "step_of_2": 1.5}
    found = speculation._joined([9, 9], [Seen(first, [1, 2]), Seen(second, [3])])
    assert found.own == [1, 2, 3]
    assert found.figures == {
        "tokens_per_second": 4,
        "drafted_per_token": 0.5,
        "accepted_share": 0.5,
        "step_of_2": 1.5,
    }


def test_ratios_and_differences_are_those_of_the_same_round() -> None:
    def rounds(way: str, *each: tuple[float, list[int]]) -> dict[Key, list[Seen]]:
        figures = ("tokens_per_second", "drafted_per_token")
        return {
            Key("bundle", "code", way): [
                Seen(dict.fromkeys(figures, rate), own) for rate, own in each
            ]
        }

    found = rounds("plain", (10, [1, 2]), (20, [1, 2]), (40, [1, 2]))
    found |= rounds("speculation", (30, [1, 2]), (20, [2, 1]), (80, [1, 3]))
    plain, guessing = speculation._sum_up(Results({}, found))["results"]
    assert guessing.ratios["plain"] == Spread(2, 1, 3)
    assert guessing.rounds["different"] == [0, 2, 1]
    assert plain.rounds["different"] == [0, 0, 0]
    same = rounds("plain", (10, [1, 1])) | rounds("speculation", (10, [1, 1]))
    assert all(
        "different" not in one.figures for one in speculation._sum_up(Results({}, same))["results"]
    )


def test_a_text_of_ones_own_and_no_guesses(tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("The capital of Peru is Lima. Spain borders France. " * 5)
    found = bench(DEMO, text, cases="speculation", speculate=False, **QUICK)
    assert [(one.case, one.way) for one in found.results] == [
        *[("own.txt", "plain"), ("own.txt", "speculation")]
    ]
    assert found.results[1].figures["drafted_per_token"] == 0
    assert "steps of" not in report_table(found)
    assert str(text) in report_table(found)


@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--cases", "speculation", "--speculate", "2", "--rounds", "1", "--new-tokens", "4"]
    assert main(["bench", str(DEMO), *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["options"] == {"speculate": 2}
    assert len(found["results"]) == 2 * len(KINDS)
