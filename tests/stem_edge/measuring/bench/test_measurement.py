"""`stem-edge measure`: figures, their agreement with the kernel's, outputs, bad input."""

from __future__ import annotations

import csv
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from installed import DEMO
from range_server import serving

import stem_edge
from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.manifest import TABLES
from stem_edge.commands.main import main
from stem_edge.drawing import FORMATS
from stem_edge.errors import InputError, MemoryPlanError
from stem_edge.measuring.memory import device_profiles
from stem_edge.measuring.phases import plots
from stem_edge.measuring.phases.measurement import Measurement
from stem_edge.measuring.phases.report import (
    EXPLAINED,
    LABELS,
    accounted,
    explanation,
    figures,
    report_table,
    to_csv,
    to_dict,
)
from stem_edge.runtime.backends.onnxruntime.prepared import looking

Capture = pytest.CaptureFixture[str]
PHASES = ["start", "import", "load", "prefill", "decode"]
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells by kind")


@pytest.fixture(scope="module")
def found() -> Measurement:
    return stem_edge.measure(DEMO, prompt_tokens=100, new_tokens=20, warm_start=False)


@pytest.mark.slow
def test_phases_and_speed(found: Measurement) -> None:
    assert [phase.name for phase in found.phases] == PHASES
    assert [phase.tokens for phase in found.phases] == [0, 0, 0, 100, 20]
    assert all(phase.seconds > 0 for phase in found.phases)
    assert len(found.steps) == 20
    assert found.context_length == 120


@pytest.mark.slow
@linux
def test_kinds_add_up_to_what_the_kernel_counts(found: Measurement) -> None:
    assert abs(accounted(found) - 1) < 0.02
    assert found.sampler_saw is not None
    assert found.sampler_saw > 0.8  # of a process that grows while it is imported


@pytest.mark.slow
@linux
def test_memory_is_where_it_must_be(found: Measurement) -> None:
    start, load, decode = found.phase("start"), found.phase("load"), found.phase("decode")
    assert start.memory.at_end.anonymous < load.memory.at_end.anonymous
    assert load.memory.at_end.libraries > 20 << 20  # type: ignore[operator]  # onnxruntime alone
    assert decode.memory.at_end.tables == 0  # pread copies
    config = stem_edge.open_bundle(DEMO).manifest.model
    assert decode.kv_cache == 2 * config.n_layers * config.n_kv_heads * 120 * config.head_dim * 4
    assert 0 < decode.row_cache < 200_000
    assert decode.device == 0
    files = sum(entry.nbytes for entry in stem_edge.open_bundle(DEMO).manifest.files.values())
    assert 0 < (decode.cached_backbone or 0) + (decode.cached_tables or 0) <= files + 100_000


@pytest.mark.slow
@linux
def test_reading_by_mmap_shows_as_mapped_tables() -> None:
    found = stem_edge.measure(DEMO, prompt_tokens=60, new_tokens=4, warm_start=False)
    assert (found.phase("decode").memory.at_end.tables or 0) > 100_000


@pytest.mark.slow
@linux
def test_predictions(found: Measurement) -> None:
    expected = found.prediction
    assert 0.98 * found.peak <= expected.anonymous <= 1.15 * found.peak
    assert expected.hit_rate == found.hit_rate
    assert expected.row_cache == found.phase("decode").row_cache
    assert expected.kv_cache == found.phase("decode").kv_cache


@pytest.mark.slow
def test_what_reads_tables_elsewhere_is_predicted(found: Measurement) -> None:
    with serving(DEMO / TABLES) as server:
        far = stem_edge.measure(
            DEMO, prompt_tokens=100, new_tokens=20, warm_start=False, tables=server.url
        )
    grown = far.prediction.anonymous - found.prediction.anonymous
    assert grown == pytest.approx(far.peak - found.peak, rel=0.4)


@pytest.mark.slow
def test_the_hit_rate_of_the_run_lies_on_its_curve(found: Measurement) -> None:
    assert list(found.hit_curve.values()) == sorted(found.hit_curve.values())
    assert found.hit_curve[max(found.hit_curve)] == found.hit_rate


@pytest.mark.slow
def test_the_table_fits_a_terminal_and_every_word_is_explained(found: Measurement) -> None:
    text = report_table(found)
    assert max(map(len, text.splitlines())) <= 80
    said = explanation(found)
    for kind in found.definitions:
        assert f"{LABELS[kind]}:" in said
    for word in ("KV cache", "row cache", "hit rate", "stall", "page cache", "predicted"):
        assert word in text and word in EXPLAINED
    for unit in ("MB", "tokens/s", " s", " ms"):
        assert unit in text


@pytest.mark.slow
def test_json_and_csv(found: Measurement) -> None:
    plain = json.loads(json.dumps(to_dict(found)))
    assert plain["figures"] == json.loads(json.dumps(figures(found)))
    assert [phase["name"] for phase in plain["phases"]] == PHASES
    rows = list(csv.DictReader(io.StringIO(to_csv(found))))
    assert [row["phase"] for row in rows] == PHASES
    assert int(rows[-1]["peak_unevictable"]) == found.phase("decode").memory.peak_unevictable
    assert int(rows[-1]["kv_cache"]) == found.phase("decode").kv_cache


@pytest.mark.slow
@pytest.mark.parametrize("suffix", FORMATS)
def test_plots(found: Measurement, tmp_path: Path, suffix: str) -> None:
    plots.plot(found, tmp_path / f"run{suffix}")
    assert (tmp_path / f"run{suffix}").stat().st_size > 5000


@pytest.mark.slow
def test_a_dense_model_that_a_first_load_prepares(
    dense_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looking, "LEAST_NBYTES", 0)
    found = stem_edge.measure(dense_bundle, prompt_tokens=20, new_tokens=4, cache_dir=tmp_path)
    assert found.preparing is not None and f"\n  {found.preparing}\n" in report_table(found)
    assert json.loads(json.dumps(to_dict(found)))["preparing"]["disk"] == found.preparing.disk > 0
    assert found.hit_rate is None and found.hit_curve == {}
    assert "hit rate" not in report_table(found)
    plots.plot(found, tmp_path / "dense.png")


@pytest.mark.slow
def test_the_command(capsys: Capture, tmp_path: Path) -> None:
    short = ["--prompt-tokens", "30", "--new-tokens", "4"]
    plot = tmp_path / "run.png"
    assert main(["measure", str(DEMO), *short, "--explain", "--plot", str(plot)]) == 0
    said, told = capsys.readouterr()
    assert "peak, anon. and swap" in said and "anonymous: memory that belongs" in said
    assert told == f"wrote {plot}\n"
    assert plot.stat().st_size
    assert main(["measure", str(DEMO), *short, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workload"]["prompt_tokens"] == 30


@pytest.mark.slow
@linux
def test_a_device_says_which_limits_are_real(capsys: Capture) -> None:
    short = ["--prompt-tokens", "30", "--new-tokens", "4"]
    assert main(["measure", str(DEMO), *short, "--device", "phone-4gb"]) == 0
    said = capsys.readouterr().out
    assert "on phone-4gb" in said and "flash:  emulated; reads delayed as ufs2" in said
    assert "memory: real; 1.2 GB" in said or "memory: emulated; planned for 1.2 GB" in said


def test_a_bundle_too_large_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(device_profiles.find_device("pi4"), memory=20_000_000)
    monkeypatch.setitem(device_profiles.DEVICES, "pi4", small)
    with pytest.raises(MemoryPlanError, match=r"20 MB for one program are too little: .* at least"):
        stem_edge.measure(DEMO, device="pi4")


def test_a_device_too_small_for_both_sets_of_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan and run take prompts through the matrices that decode, as a load there would."""
    sizes = footprint_of(stem_edge.open_bundle(DEMO).manifest, "onnxruntime")
    both = sizes.step_nbytes + sizes.prefill_nbytes
    run = "stem_edge.measuring.phases.measurement._Run.measure"
    seen: list[bool] = []
    monkeypatch.setattr(run, lambda run, *_, **__: seen.append(run.loader.needs(64).prefill))
    options: dict[str, Any] = {"device": "pi4", "memory": "500MB", "engine": "onnxruntime"}
    for size in (both, both - 1):
        device = replace(device_profiles.find_device("pi4"), memory=size)
        monkeypatch.setitem(device_profiles.DEVICES, "pi4", device)
        stem_edge.measure(DEMO, **options)
        stem_edge.measure(DEMO, prefill_graph=True, **options)  # because it is asked for
    assert seen == [True, True, False, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "toaster"], "expected one of phone-4gb"),
        (["--prompt-tokens", "5000"], "ask for fewer, or give a longer text"),
        (["--interval", "nan"], "interval is nan"),
        (["--threads", "0"], "threads is 0"),
        (["--plot", "run.gif"], "one of .png, .pdf, .svg"),
        (["--plot", "no/such/run.png"], "no such folder"),
        (["--memory", "1MB"], "too small"),
        (["--text", "no/such.txt"], "cannot read"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: Capture) -> None:
    assert main(["measure", str(DEMO), *arguments]) == 1
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_without_matplotlib_one_line_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["measure", str(DEMO), "--plot", "run.png"]) == 1
    assert "pip install 'stem-edge[plot]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_text_shorter_than_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("The capital of Peru is Lima.")
    found = stem_edge.measure(DEMO, tmp_path / "short.txt")
    assert 0 < len(found.workload.prompt) < 12
    with pytest.raises(InputError, match="give a longer text"):
        stem_edge.measure(DEMO, tmp_path / "short.txt", prompt_tokens=100)
