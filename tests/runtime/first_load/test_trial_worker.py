"""Steps of a trial, run in this process. In another process: test_trial.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import stem_edge
from stem_edge.bundle.opening import open_bundle
from stem_edge.errors import BundleError
from stem_edge.graph.formats import EngineName
from stem_edge.runtime.backends.onnxruntime.prepared import prefill_measure
from stem_edge.runtime.first_load import trial_worker
from stem_edge.runtime.first_load.trial_worker import main, measure_prefill, try_tokenizer

TEXTS = ["tokenizer.json", "texts through tokenizer.json"]


@pytest.fixture(scope="module")
def quantized(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundle") / "quantized"
    stem_edge.export_bundle(tiny_checkpoint, out, backbone="int8", prefill_graph=True)
    return out


def test_a_tokenizer_is_used(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    probed: list[object] = []
    monkeypatch.setattr(trial_worker, "probe", probed.append)
    try_tokenizer(open_bundle(tiny_bundle), told.append)
    assert told == TEXTS
    assert len(probed) == 1


def test_both_graphs_are_compared(quantized: Path) -> None:
    told: list[str] = []
    bundle = open_bundle(quantized)
    diverges = measure_prefill(bundle, told.append)
    assert diverges == pytest.approx(bundle.manifest.report.prefill_from_decode, rel=0.01)
    assert told == ["both graphs"]


def test_a_dense_bundle(tmp_path: Path) -> None:
    from make_checkpoint import Shape, write_checkpoint

    source = write_checkpoint(tmp_path / "checkpoint", Shape(stem_layers=()))
    bundle = stem_edge.export_bundle(source, tmp_path / "dense", prefill_graph=True)
    assert measure_prefill(bundle, lambda step: None) is not None


def test_there_may_be_nothing_to_compare(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill_measure, "OrtBackend", None)
    assert measure_prefill(open_bundle(tiny_bundle), lambda step: None) is None


def run(
    monkeypatch: pytest.MonkeyPatch, bundle: Path, engine: str = "onnxruntime"
) -> tuple[int, list[tuple[int, int]]]:
    """Run the worker in this process, without its limits."""
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(trial_worker, "limit_this_process", lambda *pair: limits.append(pair))
    monkeypatch.setattr(sys, "argv", ["worker", str(bundle), engine, "1000", "7"])
    return main(), limits


def test_its_steps(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tiny_bundle) == (0, [(1000, 7)])
    assert capsys.readouterr().out.splitlines() == ["manifest.json", *TEXTS, "done"]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (BundleError("x: is\nwrong;  copy it"), 11, "BundleError: x: is wrong; copy it\n"),
        (MemoryError("at\nlast"), 12, "MemoryError: at last\n"),
    ],
)
def test_its_end(
    error: Exception,
    status: int,
    said: str,
    tiny_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(trial_worker, "try_tokenizer", fails)
    assert run(monkeypatch, tiny_bundle)[0] == status
    assert capsys.readouterr() == ("manifest.json\n", said)


@pytest.mark.parametrize("engine", ["onnxruntime", "ggml"])
def test_only_onnxruntime_has_graphs_to_compare(
    engine: EngineName,
    tiny_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(trial_worker, "measure_prefill", lambda *_: 0.12345)
    assert run(monkeypatch, tiny_bundle, engine)[0] == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == ("done 0.123" if engine == "onnxruntime" else "done")
