"""`stem-edge measure`: its JSON, tables, and bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from installed import DEMO

import stem_edge
from stem_edge.apps.measuring.runs import measure as runner
from stem_edge.apps.measuring.runs import subjects
from stem_edge.apps.measuring.runs.report import report_table, to_dict
from stem_edge.apps.measuring.runs.results import Report
from stem_edge.apps.measuring.runs.subjects import load_options, make_subjects
from stem_edge.apps.measuring.runs.workers import Subject
from stem_edge.bundle.opening import open_bundle
from stem_edge.commands.main import main
from stem_edge.runtime.backends.options import LoadOptions

Capture = pytest.CaptureFixture[str]
PHASES = ["start", "load", "first", "prompt", "decode"]
SHORT = ["--prompt-tokens", "30", "-n", "4", "--rounds", "1"]
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells by kind")


@pytest.fixture(scope="module")
def found() -> Report:
    return stem_edge.measure(
        DEMO,
        prompt_tokens=100,
        new_tokens=20,
        rounds=2,
        cases=["resident", "slots=40,overlap=false"],
    )


@pytest.mark.slow
def test_every_subject_runs_all_phases_in_each_round(found: Report) -> None:
    assert list(found.subjects) == ["bundle", "resident", "slots=40,overlap=false"]
    for result in found.subjects.values():
        assert len(result.rounds) == 2 and not result.failed
        for one in result.rounds:
            assert [phase.name for phase in one.phases] == PHASES
            assert [phase.tokens for phase in one.phases] == [0, 0, 16, 100, 20]
            assert all(phase.seconds > 0 for phase in one.phases)
            assert len(one.phases[-1].steps) == 20
    hits = [result.figures()["hit_rate"] for result in found.subjects.values()]
    assert hits[1] == 1 > hits[0] >= hits[2] > 0
    assert found.subjects["slots=40,overlap=false"].figures()["slots"] == 40
    assert found.settings["context_length"] == 120


@pytest.mark.slow
@linux
def test_memory_is_where_it_must_be(found: Report) -> None:
    one = found.subjects["bundle"].rounds[-1]
    for phase in one.phases:
        memory = phase.memory
        assert memory.peak_unevictable >= memory.at_end.unevictable
    load, decode = one.phases[1], one.phases[-1]
    assert load.memory.at_end.unevictable > one.phases[0].memory.at_end.unevictable
    assert decode.counters["kv_nbytes"] > load.counters["kv_nbytes"]
    assert decode.counters["row_cache_nbytes"] > 0


@pytest.mark.slow
def test_the_table_and_json(found: Report) -> None:
    table = report_table(found)
    for words in ("last round", "in it: row cache", "bundle / resident: ", "hits"):
        assert words in table
    figures = json.loads(json.dumps(to_dict(found)))
    bundle = figures["figures"]["bundle"]
    assert bundle["prompt"] == found.subjects["bundle"].figures()["prompt"]
    assert figures["ratios"]["resident"]["median_step"]["median"] > 0
    assert len(figures["rounds"]["resident"]) == 2
    assert figures["settings"]["options"] == {"engine": "onnxruntime"}


@pytest.mark.slow
def test_the_command_with_another_bundle(dense_bundle: Path, capsys: Capture) -> None:
    given = [*SHORT, "--slots", "64", "--json", "--against", str(dense_bundle), str(DEMO)]
    assert main(["measure", *given]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["bundle"] == str(DEMO)
    assert list(figures["figures"]) == ["bundle", str(dense_bundle)]
    assert "slots" not in figures["figures"][str(dense_bundle)]  # --slots is not for dense models


@pytest.mark.slow
def test_what_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Subject("lost", "llama.cpp", "no/such.gguf")
    make = subjects.make_subjects
    monkeypatch.setattr(runner, "make_subjects", lambda *given: [*make(*given), lost])
    seen: list[str] = []
    found = stem_edge.measure(
        DEMO, prompt_tokens=8, new_tokens=2, rounds=2, threads=1, notify=seen.append
    )
    assert len(found.subjects["bundle"].rounds) == 2
    assert found.subjects["lost"].failed.startswith("round 1 of 2: lost")
    assert "round 2 of 2: lost" not in seen and seen[-1] == ""


def test_cases_are_options_of_load() -> None:
    given = LoadOptions(context_length=64, memory="90MB", cache_dir=Path("/c"))
    own, resident, both = make_subjects(
        open_bundle(DEMO), given, ["resident", "kv=fp16,overlap=false"], []
    )
    kept = {"memory": "90MB", "cache_dir": "/c", "engine": "onnxruntime"}
    assert own.options == kept == load_options(given) | {"engine": "onnxruntime"}
    assert resident.options == kept | {"resident": True}
    assert both.options == kept | {"kv": "fp16", "overlap": False}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-tokens", "5000"], "ask for fewer, or give a longer text"),
        (["--rounds", "0"], "rounds is 0"),
        (["--threads", "0"], "threads is 0"),
        (["--text", "no/such.txt"], "cannot read"),
        (["--against", "no/such.gguf"], "no/such.gguf"),
        (["--against", "no/such"], "no/such"),
        (["--cases", "speed=9"], "'speed' is no option; expected one of"),
        (["--cases", "slots=many"], "slots is 'many'"),
        (["--cases", "threads=1"], "'threads' is no option"),
        (["--cases", "kv=telepathy"], "kv is 'telepathy'"),
        (["--provider", "qnn"], "provider is 'qnn'"),
    ],
    ids=str,
)
def test_bad_input(arguments: list[str], message: str, capsys: Capture) -> None:
    assert main(["measure", str(DEMO), *arguments]) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
