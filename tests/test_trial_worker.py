"""The steps of a trial, in this process, where they can be measured; in one of its own: test_trial."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import needs_ggml

import stem_edge
from stem_edge.bundle import open_bundle
from stem_edge.errors import BundleError
from stem_edge.formats import EngineName
from stem_edge.runtime import trial_worker
from stem_edge.runtime.backend import NotFiniteError
from stem_edge.runtime.text import TextCodec
from stem_edge.runtime.trial_worker import main, try_backbone, try_tokenizer

TEXTS = ["tokenizer.json", "texts through tokenizer.json"]


@pytest.fixture(scope="module")
def quantized(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundle") / "quantized"
    stem_edge.export_bundle(tiny_checkpoint, out, backbone="int8", prefill_graph=True)
    return out


def test_a_tokenizer_is_used(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    probed: list[object] = []
    monkeypatch.setattr(TextCodec, "probe", lambda codec: probed.append(codec))
    try_tokenizer(open_bundle(tiny_bundle), told.append)
    assert told == TEXTS
    assert len(probed) == 1


def test_every_graph_is_loaded_and_used(quantized: Path) -> None:
    told: list[str] = []
    bundle = open_bundle(quantized)
    diverges = try_backbone(bundle, "onnxruntime", None, told.append)
    assert diverges == pytest.approx(bundle.manifest.report.prefill_from_decode, rel=0.01)
    graphs = [name for name in told if name.endswith(".onnx")]
    assert len(graphs) == len(bundle.manifest.graphs())
    assert told[0] == "the checks of the graphs"
    assert told[-2:] == ["computing 48 tokens", "computing 48 tokens of a prompt"]


@needs_ggml
def test_a_backbone_for_ggml(tiny_gguf: Path, tried: Path) -> None:
    told: list[str] = []
    try_backbone(open_bundle(tiny_gguf), "ggml", str(tried), told.append)
    assert told == ["backbone.gguf", "computing 16 tokens"]


@pytest.mark.parametrize("engine", ["onnxruntime", pytest.param("ggml", marks=needs_ggml)])
def test_a_dense_bundle(engine: EngineName, tmp_path: Path, tried: Path) -> None:
    from make_checkpoint import Shape, write_checkpoint

    source = write_checkpoint(tmp_path / "checkpoint", Shape(stem_layers=()))
    options: dict[str, Any] = {"onnxruntime": {"backbone": "fp32"}, "ggml": {"engine": "gguf"}}
    bundle = stem_edge.export_bundle(source, tmp_path / "dense", **options[engine])
    try_backbone(bundle, engine, str(tried), lambda step: None)


class Context:
    """Computes nothing, and keeps what it was given."""

    def __init__(self, error: Exception | None) -> None:
        self.error, self.calls = error, list[tuple[Any, ...]]()

    def open_context(self, length: int) -> Context:
        self.calls.append(("open", length))
        return self

    def begin(self, ids: Any, start: int, *, prefill: bool) -> None:
        self.calls.append(("begin", ids.tolist(), start, prefill))

    def finish(self, slots: Any, last: int) -> None:
        self.calls.append(("finish", np.asarray(slots).shape[0], last))
        if self.error is not None:
            raise self.error


def test_what_is_computed(quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are none come from rows that no token has."""
    context = Context(NotFiniteError("not a number"))
    monkeypatch.setattr(trial_worker, "_open_graphs", lambda *_: context)
    monkeypatch.setattr(trial_worker, "_open_ggml", lambda *_: context)
    bundle = open_bundle(quantized)
    assert try_backbone(bundle, "onnxruntime", None, lambda step: None) is None
    ids = list(bundle.manifest.report.probe_tokens)
    assert context.calls[:2] == [("open", 48), ("begin", ids, 0, False)]
    assert context.calls[3:5] == [("open", 48), ("begin", ids, 0, True)]
    assert [call[0] for call in context.calls] == ["open", "begin", "finish"] * 2
    assert context.calls[2][2] == 48
    context.calls.clear()
    try_backbone(bundle, "ggml", None, lambda step: None)
    assert context.calls[:2] == [("open", 16), ("begin", list(range(16)), 0, False)]
    assert len(context.calls) == 3
    context.error = ValueError()
    with pytest.raises(ValueError):
        try_backbone(bundle, "ggml", None, lambda step: None)


def run(
    monkeypatch: pytest.MonkeyPatch, bundle: Path, engine: str = "onnxruntime"
) -> tuple[int, list[tuple[int, int]]]:
    """The worker in this process, without its limits."""
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(trial_worker, "limit_this_process", lambda *pair: limits.append(pair))
    monkeypatch.setattr(sys, "argv", ["worker", str(bundle), engine, "1000", "7", "cache"])
    return main(), limits


def test_its_steps(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, tiny_bundle) == (0, [(1000, 7)])
    told = capsys.readouterr().out.splitlines()
    assert told[:3] == ["manifest.json", *TEXTS]
    assert told[-1] == "done"


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


@pytest.mark.parametrize("engine", ["onnxruntime", pytest.param("ggml", marks=needs_ggml)])
def test_the_engine_is_imported_before_the_first_step(
    engine: str,
    tiny_bundle: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    imported: list[tuple[str, str]] = []
    used: list[object] = []
    monkeypatch.setattr(
        trial_worker, "import_module", lambda name: imported.append((name, capsys.readouterr().out))
    )
    monkeypatch.setattr(trial_worker, "try_tokenizer", lambda *_: None)
    monkeypatch.setattr(trial_worker, "try_backbone", lambda bundle, *rest: used.extend(rest[:2]))
    assert run(monkeypatch, tiny_bundle, engine)[0] == 0
    (name,) = imported
    assert name == (trial_worker.OPENED_BY[engine], "")  # type: ignore[index]
    assert used == [engine, "cache"]
