"""`stem-edge bench --cases 1,2` with the demo: measured and printed figures, but never their values."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from installed import DEMO

from stem_edge.commands.main import main
from stem_edge.errors import InputError
from stem_edge.measuring.bench import sequences
from stem_edge.measuring.bench.bench import bench
from stem_edge.measuring.bench.cases import Key, PhasePeak, Results, Seen, Spread, Watched
from stem_edge.measuring.bench.figures import Report
from stem_edge.measuring.bench.report import report_table
from stem_edge.measuring.bench.workers import Subject

QUICK: dict[str, Any] = {"prompt_tokens": 8, "new_tokens": 4, "rounds": 1, "threads": 1}
FIGURES = {
    *("tokens_per_second", "first_token_seconds", "anonymous", "rows_read_per_token"),
    *("distinct_rows_per_step", "distinct_rows_per_token", "flash_bytes_per_token"),
}


@pytest.fixture(scope="module")
def report() -> Report:
    return bench(DEMO, cases="2,4", speculate=True, **QUICK)


def test_every_number_of_sequences_is_measured_beside_one(report: Report) -> None:
    assert [(one.subject, one.case) for one in report.results] == [
        ("bundle", count) for count in "124"
    ]
    for one in report.results:
        assert set(one.figures) >= FIGURES
        assert one.figures["anonymous"] > 1e6
        assert one.ratios["gain"].least > 0
        assert ("allowed" in one.ratios) == ("allowed_gain" in one.figures)
    assert report.results[0].ratios["gain"] == Spread(1, 1, 1)
    assert report.settings.context_length == 8 + 4 + 2 * 4
    assert json.loads(json.dumps(asdict(report)))["results"][1]["case"] == "2"


def test_the_table(report: Report) -> None:
    text = report_table(report)
    assert "prompts of 8, 4 tokens of each while all decode, 1 rounds" in text
    assert "bundle: 4 sequences / 1: " in text and "bundle: 1 sequences / 1" not in text
    measured = "allowed" in report.results[2].ratios  # a busy machine cannot
    assert measured == ("that the cost of a step of 4 tokens allows: " in text)
    assert "bundle / " not in text


def test_gains_are_those_of_the_same_round_and_against_others() -> None:
    def rounds(*rates: float) -> list[Seen]:
        return [
            Seen({"tokens_per_second": rate, "first_token_seconds": rate / 4, "allowed_gain": 2.5})
            for rate in rates
        ]

    found = {
        Key("bundle", "1"): rounds(10, 20, 30),
        Key("bundle", "4"): rounds(20, 50, 60),
        Key("other", "1"): rounds(5, 10, 30),
        Key("other", "4"): rounds(10, 10, 30),
    }
    peaks = {f"{count} together": PhasePeak(count, None, {}) for count in (1, 4)}
    watched = {name: Watched(peaks=peaks) for name in ("bundle", "other")}
    one, four, other, other_four = sequences._sum_up(Results(watched, found))["results"]
    assert (one.figures["anonymous"], four.figures["anonymous"]) == (1, 4)
    assert four.ratios["gain"] == Spread(2, 2, 2.5)
    assert four.ratios["first"] == Spread(2, 2, 2.5)
    assert four.ratios["allowed"] == Spread(0.8, 0.8, 1)
    assert four.figures["tokens_per_second"] == 50
    assert "bundle" not in four.ratios
    assert other.ratios["bundle"] == Spread(2, 1, 2)
    assert other_four.ratios["bundle"] == Spread(2, 2, 5)
    assert str(one.ratios["gain"]) == "1.00 (1.00 to 1.00)"


def test_subjects_are_loaded_for_all_sequences() -> None:
    llama = Subject("llama.cpp x", "llama.cpp", "x", {"repack": False})
    assert sequences._many(llama, 8).options == {
        "each": True,
        "unified": False,
        "repack": False,
        "sequences": 8,
    }
    llama = Subject("llama.cpp x unified", "llama.cpp", "x", {"unified": True})
    assert sequences._many(llama, 8).options["unified"]
    bundle = Subject("bundle", "stem-edge", "x", {"sequences": 3})
    assert sequences._many(bundle, 8).options == {"sequences": 9}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"cases": "0,2"}, "sequences has 0; expected numbers from 1 on"),
        ({"cases": "two"}, "cases is 'two'; expected numbers of sequences, like 1,2,4, or specul"),
        ({"rounds": 0}, "rounds is 0"),
        ({"against": ["nothing"]}, "is not known"),
        ({"prompt_tokens": 300}, r"16 sequences .* contexts of 508; expected at most 256"),
        ({"context_length": 20}, "prompts of 5 tokens and 2 new ones .* expected at most 20"),
        ({"new_tokens": 1}, "2 or more new ones"),
    ],
)
def test_wrong_options(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bench(DEMO, **{"cases": "16", **wrong})


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    arguments = ["--cases", "2", "--rounds", "1", "--prompt-tokens", "8", "--new-tokens", "2"]
    assert main(["bench", str(DEMO), *arguments, "--against", "plain", "--output", str(out)]) == 0
    assert "bundle / plain, 2 sequences: " in capsys.readouterr().out
    assert {one["subject"] for one in json.loads(out.read_text())["results"]} == {"bundle", "plain"}


ONE_TOKEN = "--cold and --limit are for one token at a time"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cases", "2", "--cold"], ONE_TOKEN),
        (["--cases", "speculation", "--limit", "1GB"], ONE_TOKEN),
        (["--batches", "1,2"], "--batches is --cases now; write for example --cases 1,2,4"),
        (["--speculation"], "--speculation is --cases now; write --cases speculation"),
    ],
)
def test_options_that_are_gone_or_do_not_go_together(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(DEMO), *options]) == 1
    assert message in capsys.readouterr().err
