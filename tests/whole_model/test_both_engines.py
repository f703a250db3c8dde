"""Measurements on ggml, of bundles with its backbone only and of bundles with both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from installed import needs_ggml

import stem_edge
from stem_edge.bundle.opening import open_bundle
from stem_edge.commands.main import main
from stem_edge.errors import BackendError, InputError
from stem_edge.measuring.quality.quality import evaluate
from stem_edge.runtime.backends.ggml.engine import GgmlEngine
from stem_edge.runtime.backends.ggml.expected import CHOICES
from stem_edge.runtime.backends.onnxruntime.engine import OnnxRuntimeEngine
from stem_edge.runtime.consistency import verify_runs

Capture = pytest.CaptureFixture[str]
pytestmark = [pytest.mark.slow, needs_ggml]
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells by kind")
WAYS = 12  # of running on one engine, as tests/runtime/test_consistency.py lists them


@pytest.fixture(scope="module")
def both(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle with a backbone for each engine, both in float32."""
    out = tmp_path_factory.mktemp("both") / "bundle"
    stem_edge.export_bundle(tiny_checkpoint, out, backbone="fp32")
    stem_edge.export_bundle(tiny_checkpoint, out, engine="gguf", backbone="f32", add=True)
    return out


@pytest.fixture(scope="module")
def alone(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle with a GGUF backbone alone, which can be rearranged."""
    out = tmp_path_factory.mktemp("alone") / "bundle"
    stem_edge.export_bundle(tiny_checkpoint, out, engine="gguf", backbone="q4_0")
    return out


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The capital of Peru is Lima, and that of France is Paris. " * 3)
    return path


def test_runs_of_both_engines_give_what_each_gives(both: Path) -> None:
    seen: list[str] = []
    results = verify_runs(both, max_new_tokens=8, progress=seen.append)
    assert seen == list(results)
    unlike = {way for way, found in results.items() if found != "ok"}
    assert unlike == {"smaller chunks, ggml"} and len(results) == 2 * WAYS
    assert {"plain", "plain, ggml", "fewest slots, ggml", "mmap, ggml"} <= set(results)


def test_repacked_runs_are_compared_with_each_other(alone: Path) -> None:
    names = GgmlEngine().ways.kernels(open_bundle(alone), None)
    assert names["ggml"] == {}
    if "ggml repacked" not in names:
        pytest.skip("this build of ggml cannot repack weights")
    assert names["ggml repacked"] == {"repack": True}
    results = verify_runs(alone, max_new_tokens=4)
    assert results["overlapped, ggml repacked"] == results["mmap, ggml repacked"] == "ok"


def test_a_missing_engine_is_named(
    both: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(GgmlEngine, "installed", False)
    assert main(["verify", str(both), "--runs"]) == 0
    assert "not run: ggml is not installed" in capsys.readouterr().out
    assert main(["verify", str(both), "--runs", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True and found["runs"]["ggml"].startswith("not run")


def test_no_engine_at_all(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in (OnnxRuntimeEngine, GgmlEngine):
        monkeypatch.setattr(engine, "installed", False)
    with pytest.raises(BackendError, match="ggml is not installed"):
        verify_runs(alone)


def test_fit_plans_for_the_engine_that_runs_it(both: Path, alone: Path, capsys: Capture) -> None:
    (of_alone,) = stem_edge.fit(alone, "100MB", bandwidth="10GB")
    (of_both,) = stem_edge.fit(both, "100MB", bandwidth="10GB")
    (chosen,) = stem_edge.fit(both, "100MB", bandwidth="10GB", engine="ggml")
    engines = [one.plan.engine for one in (of_alone, of_both, chosen)]
    assert engines == ["ggml", "onnxruntime", "ggml"]
    assert chosen.mapped == chosen.footprint.step_nbytes > 0
    assert of_both.mapped == 0  # because small ones are not prepared
    assert main(["fit", str(both), "--memory", "100MB", "--bandwidth", "1GB"]) == 0
    assert "--engine" not in capsys.readouterr().out
    arguments = ["--bandwidth", "1GB", "--engine", "ggml", "--repack"]
    assert main(["fit", str(alone), "--memory", "100MB", *arguments]) == 0
    out = capsys.readouterr().out
    assert "backbone q4_0 for ggml" in out and "--engine ggml --repack" in out
    with pytest.raises(InputError, match="repack: not supported by the engine in use"):
        stem_edge.fit(both, "100MB", bandwidth="10GB", repack=True)


def test_fit_names_mixtures_for_a_checkpoint(tiny_checkpoint: Path, capsys: Capture) -> None:
    found = stem_edge.fit(tiny_checkpoint, device="pi5", engine="ggml")
    assert [(one.types.weights, one.tables) for one in found] == list(CHOICES)
    assert main(["fit", str(tiny_checkpoint), "--device", "pi5", "--engine", "ggml"]) == 0
    assert "OUT --engine gguf --backbone q8_0 --tables int8" in capsys.readouterr().out
    with pytest.raises(InputError, match="engine is 'torch'"):
        stem_edge.fit(tiny_checkpoint, device="pi5", engine="torch")


def test_eval_compares_the_engines_of_one_bundle(both: Path, text: Path, capsys: Capture) -> None:
    found = evaluate(both, text, engine="ggml", against=both, against_engine="onnxruntime")
    assert found.engine == "ggml" and found.divergence is not None
    assert found.divergence.reference_engine == "onnxruntime"
    assert found.divergence.mean < 1e-6  # both compute in float32
    arguments = ["--text", str(text), "--engine", "ggml", "--against", str(both)]
    assert main(["eval", str(both), *arguments, "--against-engine", "ggml"]) == 0
    out = capsys.readouterr().out
    assert "computed by ggml" in out and f"reference {both} on ggml" in out
    assert main(["eval", str(both), "--text", str(text), "--engine", "ggml", "--prefill"]) == 1


def test_inspect_plans_memory_by_engine(both: Path, capsys: Capture) -> None:
    plans = {}
    for engine in ("onnxruntime", "ggml"):
        assert main(["inspect", str(both), "--memory", "--engine", engine, "--json"]) == 0
        plans[engine] = json.loads(capsys.readouterr().out)
        assert plans[engine]["engine"] == engine
    assert plans["ggml"]["weights"] < plans["onnxruntime"]["weights"]


NO_ONNXRUNTIME = """
import importlib.util, sys
sys.modules["onnxruntime"] = None  # importing it raises
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "onnxruntime" else real(name, *rest)
"""
USES = {
    "load": "model = stem_edge.load({0!r}); model.generate_text('The', max_new_tokens=2)",
    "memory_plan": "stem_edge.memory_plan({0!r})",
    "verify_runs": "from stem_edge.runtime.consistency import verify_runs\n"
    "assert 'plain, ggml' in verify_runs({0!r}, max_new_tokens=2)",
    "fit": "stem_edge.fit({0!r}, '100MB', bandwidth='1GB')",
    "evaluate": "stem_edge.evaluate({0!r}, {1!r})",
    "measure": "stem_edge.measure({0!r}, prompt_tokens=8, new_tokens=2)",
}


@pytest.mark.parametrize("name", USES)
def test_without_onnxruntime_everything_runs_on_ggml(name: str, both: Path, text: Path) -> None:
    code = f"{NO_ONNXRUNTIME}\nimport stem_edge\n{USES[name].format(str(both), str(text))}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
