"""`stem-edge bench` with the demo: measured and printed figures, but never their values."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from installed import DEMO

from stem_edge.bundle.opening import open_bundle
from stem_edge.commands.main import main
from stem_edge.errors import BackendError, InputError, StemEdgeError
from stem_edge.measuring.bench import subjects
from stem_edge.measuring.bench.bench import Turns, bench, machine
from stem_edge.measuring.bench.cases import PhasePeak, Watched
from stem_edge.measuring.bench.figures import Report, Round, figures_of, ratios
from stem_edge.measuring.bench.report import report_table
from stem_edge.measuring.bench.workers import Subject, WorkerAnswer
from stem_edge.measuring.memory.limits import Limit, ProcessLimits

Capture = pytest.CaptureFixture[str]
QUICK = ["--rounds", "1", "--loads", "0", "--prompt-tokens", "8", "--new-tokens", "2"]


@pytest.fixture(scope="module", autouse=True)
def little_memory_to_read() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stem_edge.measuring.planning.bandwidth.READ_NBYTES", 1 << 20)
        yield


@pytest.fixture(scope="module")
def report() -> Report:
    against = ("resident", "flash=emmc", "resident")
    return bench(DEMO, against=against, prompt_tokens=24, new_tokens=6, rounds=1, loads=0)


@pytest.mark.slow
def test_a_report_says_how_it_was_made_and_is_json(report: Report) -> None:
    assert json.loads(json.dumps(asdict(report)))["bundle"] == str(DEMO)
    assert (report.settings.prompt_tokens, report.settings.context_length) == (24, 30)
    assert report.settings.options == {}  # as load and generate do without them
    assert report.subjects["bundle"].slots == open_bundle(DEMO).manifest.model.vocab_size
    assert report.machine
    assert len(report.bandwidth) == report.settings.rounds == 1
    assert report.token_nbytes > 0


@pytest.mark.slow
def test_every_subject_is_measured(report: Report) -> None:
    assert list(report.subjects) == ["bundle", "resident", "flash=emmc"]
    for figures in report.subjects.values():
        assert list(figures.peak_memory) == ["import", "load", "prefill", "decode"]
        assert all(peak.unevictable > 0 for peak in figures.peak_memory.values())
        assert figures.decode_tokens_per_second == figures.rounds["decode"][0]
        assert figures.load_seconds is None  # because none is asked for
        assert figures.cold_load_to_first_token_seconds is None
    resident, slow = report.subjects["resident"], report.subjects["flash=emmc"]
    assert (resident.hit_rate, resident.flash_bytes_per_token) == (1, 0)
    assert slow.flash_bytes_per_token == report.subjects["bundle"].flash_bytes_per_token


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, the system does not tell kinds")
def test_memory_is_known_by_kind(report: Report) -> None:
    peak = report.subjects["bundle"].peak_memory["decode"]
    assert peak.mapped is not None
    assert {"anonymous", "backbone", "tables", "libraries"} <= set(peak.kinds)


def test_tables(report: Report) -> None:
    text = report_table(report)
    assert "flash is EMULATED" in text
    assert "prompts of 24, 6 steps, 1 rounds; the text inside this package" in text
    for name in ("resident", "flash=emmc"):
        for rate in ("prefill", "decode", "median step"):
            assert f"bundle / {name}: {rate} " in text
    assert "of it reached" in text
    assert "not a comparison" not in text
    other = report.subjects | {"llama.cpp Q4_K_M": report.subjects["bundle"]}
    text = report_table(replace(report, subjects=other))
    assert "These are speeds, not a comparison: llama.cpp has weights of its own" in text


def test_medians_and_ratios() -> None:
    def measured(factor: float) -> list[Round]:
        before = {"bytes_read": 10.0, "stall_seconds": 0.0, "hits": 0.0, "misses": 0.0}
        after = {"bytes_read": 30.0, "stall_seconds": 1.0, "hits": 3.0, "misses": 1.0}
        return [
            Round(8, {}, WorkerAnswer(s, [], before), WorkerAnswer(9.0, [s, 3 * s], after))
            for s in (factor, 4 * factor, 2 * factor)
        ]

    found = {
        "bundle": figures_of(measured(1), Watched()),
        "other": figures_of(measured(2), Watched()),
    }
    figures = found["bundle"]
    assert figures.prefill_tokens_per_second == median([8, 2, 4])
    assert figures.decode_tokens_per_second == median([2 / 4, 2 / 16, 2 / 8])
    assert (figures.hit_rate, figures.flash_bytes_per_token) == (0.75, 10)
    assert figures.stall_seconds_per_token == 0.5
    assert [(r.against, r.median, r.least, r.most) for r in ratios(found)] == [
        ("other", 2, 2, 2)
    ] * 3


@pytest.mark.slow
def test_the_command_prints_json_and_writes_it(tmp_path: Path, capsys: Capture) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "report.json"
    text.write_text("The capital of France is Paris. The capital of Peru is Lima.")
    arguments = [str(DEMO), *QUICK, "--text", str(text), "--memory", "500MB", "--cold"]
    arguments += ["--loads", "1", "--against", "resident"]
    if not hasattr(os, "posix_fadvise"):
        arguments.remove("--cold")
    assert main(["bench", *arguments, "--json", "--output", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads(out.read_text())
    assert found["settings"]["options"] == {"memory": "500MB"}
    assert found["settings"]["text"] == str(text)
    loads = {name: each["load_seconds"] for name, each in found["subjects"].items()}
    assert loads["bundle"] > 0 and loads["resident"] is None


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"against": ["nothing"]}, "is not known; expected one of resident, unprepared"),
        ({"against": ["resident=2"]}, "is not known"),
        ({"against": ["flash"]}, "is not known"),
        ({"against": ["dense"]}, "is not known"),
        ({"against": ["flash=tape"]}, "expected one of nvme"),
        ({"against": ["cpu"]}, "the bundle runs on the CPU itself; .*--providers"),
        (
            {"against": ["unprepared"], "device_memory": "1GB"},
            "nothing is prepared on accelerators; .*on the CPU",
        ),
        (
            {"repack": True, "engine": "onnxruntime"},
            "repack: not supported by the engine in use, onnxruntime",
        ),
        ({"against": ["llama.cpp"]}, "llama.cpp is not known; .* llama.cpp=FILE.gguf"),
        (
            {"against": ["llama.cpp=x.gguf,lasy"]},
            "'lasy' is not known; expected lazy, no-lazy, no-r",
        ),
        ({"against": ["transformers=model"]}, "stem-edge no longer runs transformers; .*llama.cpp"),
        ({"against": ["torch"]}, "stem-edge no longer runs torch; .*llama.cpp"),
        ({"limit": "2"}, "has no unit"),
        ({"rounds": 0}, "expected at least 1"),
        ({"loads": -1}, "expected at least 0"),
        ({"threads": 0}, "expected at least 1"),
    ],
    ids=str,
)
def test_wrong_options(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bench(DEMO, **wrong)


def test_a_missing_engine_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"llama_cpp.*'stem-edge\[bench\]'"):
        bench(DEMO, against=["llama.cpp=x.gguf"])


def test_modes_of_llama_are_subjects_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subjects, "find_spec", lambda name: name)
    (tmp_path / "x.gguf").touch()
    words = ["", ",lazy", ",no-lazy", ",no-repack", ",lazy,no-repack", ",lazy"]
    common = subjects.Common(open_bundle(DEMO), "onnxruntime", {})
    _, *made = subjects.make_subjects(common, [f"llama.cpp={tmp_path}/x.gguf{w}" for w in words])
    assert [(each.name, each.options) for each in made] == [
        ("llama.cpp x.gguf", {}),
        ("llama.cpp x.gguf lazy", {"lazy": True}),
        ("llama.cpp x.gguf no-lazy", {"lazy": False}),
        ("llama.cpp x.gguf no-repack", {"repack": False}),
        ("llama.cpp x.gguf lazy no-repack", {"lazy": True, "repack": False}),
    ]
    assert {each.path for each in made} == {str(tmp_path / "x.gguf")}


def test_subjects_of_the_same_name_are_named_by_their_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subjects, "find_spec", lambda name: name)
    files = [tmp_path / folder / "x.gguf" for folder in "ab"]
    for file in files:
        file.parent.mkdir()
        file.touch()
    common = subjects.Common(open_bundle(DEMO), "onnxruntime", {})
    words = [f"llama.cpp={file}{mode}" for file in (*files, files[0]) for mode in ("", ",lazy")]
    _, *made = subjects.make_subjects(common, words[1:])
    expected = [(files[0], " lazy"), (files[1], ""), (files[1], " lazy"), (files[0], "")]
    names = [(f"llama.cpp {file}{mode}", str(file)) for file, mode in expected]
    assert [(each.name, each.path) for each in made] == names


@pytest.fixture
def confined(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Process -> limit, of processes that would be confined."""
    seen: dict[int, int] = {}

    def confine(limits: ProcessLimits, pid: int, nbytes: int) -> Limit:
        seen[pid] = nbytes
        return Limit("memory", "real", "")

    monkeypatch.setattr(ProcessLimits, "confine_memory", confine)
    return seen


@pytest.mark.slow
def test_limited_rounds_load_anew_and_go_on_without_what_does_not_fit(
    confined: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = subjects.make_subjects
    lost = Subject("lost", "llama.cpp", "no/such.gguf")
    where = "stem_edge.measuring.bench.bench.make_subjects"
    monkeypatch.setattr(where, lambda *given: [*make(*given), lost])
    seen: list[str] = []
    found = bench(
        DEMO, prompt_tokens=8, new_tokens=2, rounds=2, limit="1GB", threads=1, notify=seen.append
    )
    assert list(found.subjects) == ["bundle"] and list(found.failed) == ["lost"]
    figures = found.subjects["bundle"]
    assert len(figures.rounds["decode"]) == 2 and found.bandwidth == []
    assert (figures.load_to_first_token_seconds or 0) > (figures.load_seconds or 0) > 0
    # One that tries if it is possible at all, two rounds of the bundle, and the first of the other.
    assert list(confined.values()) == [10**9] * 4
    assert seen.count("preparing bundle") == 1 and "round 2 of 2: lost" not in seen
    text = report_table(found)
    assert (
        "in a cgroup of 1 GB, no file in the page cache" in text
        and "failed in round 1 of 2: " in text
    )


def test_a_bundle_that_is_killed_in_a_later_round_keeps_the_figures_of_earlier_ones(
    confined: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = Counter[str]()

    def limited_round(
        turns: Turns[Round], subject: Subject, run: object, limit: int, watched: Watched
    ) -> dict[str, Round]:
        rounds[subject.name] += 1
        if rounds[subject.name] == 2 and subject.name == "bundle":
            raise StemEdgeError("the system killed it")
        watched.peaks = {"decode": PhasePeak(1, None, {})}
        before = {"bytes_read": 0.0, "stall_seconds": 0.0}
        return {"": Round(8, {}, WorkerAnswer(1.0, [], before), WorkerAnswer(1.0, [1.0], before))}

    monkeypatch.setattr(Turns, "_limited_round", limited_round)
    monkeypatch.setattr(Turns, "_load", lambda *_: (1.0, 1.0))
    found = bench(DEMO, against=["plain"], rounds=3, limit="1GB", prompt_tokens=8, new_tokens=2)
    assert found.failed == {"bundle": "round 2 of 3: the system killed it"}
    counts = {name: len(each.rounds["decode"]) for name, each in found.subjects.items()}
    assert counts == {"bundle": 1, "plain": 3}
    assert "failed in round 2 of 3: the system killed it" in report_table(found)


def test_a_bundle_that_does_not_fit_a_limit_is_an_error(
    confined: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stem_edge.measuring.bench.workers.COMMAND", "")  # ends at once
    with pytest.raises(StemEdgeError, match="bundle ended while it was measured"):
        bench(DEMO, limit="1GB", prompt_tokens=8, new_tokens=2)
    assert list(confined.values()) == [10**9]  # of the process that tries if it can be confined


def test_a_limit_needs_a_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stem_edge.measuring.memory.limits.memory_cgroup", lambda: None)
    made = pytest.fail  # what it is compared with may take minutes to make
    monkeypatch.setattr("stem_edge.measuring.bench.bench.make_subjects", lambda *_: made("made"))
    with pytest.raises(InputError, match=r"limit is 1 GB, but no cgroup .* systemd-run"):
        bench(DEMO, limit="1GB")


def test_cold_says_where_it_is_not_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    with pytest.raises(InputError, match="cold is not possible here"):
        bench(DEMO, cold=True)


def test_the_machine_has_a_name_where_there_is_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stem_edge.measuring.bench.bench.cpu_info", dict)
    assert machine().endswith(" GB")
