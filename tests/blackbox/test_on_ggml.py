"""What runs on ggml: comparisons of runs, plans, evaluation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from installed import needs_ggml

import stem_edge
from stem_edge.apps.measuring.quality.quality import evaluate
from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.opening import open_bundle
from stem_edge.commands.main import main

Capture = pytest.CaptureFixture[str]
pytestmark = [pytest.mark.slow, needs_ggml]


@pytest.fixture(scope="module")
def alone(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny bundle with weights that can be rearranged."""
    out = tmp_path_factory.mktemp("alone") / "bundle"
    stem_edge.export_bundle(tiny_checkpoint, out, engine="ggml", type="q4_0")
    return out


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The capital of Peru is Lima, and that of France is Paris. " * 3)
    return path


def test_fit_plans_for_the_engine_that_runs_it(
    tiny_bundle: Path, alone: Path, capsys: Capture
) -> None:
    figures = []
    for path in (alone, tiny_bundle):
        assert main(["fit", str(path), "--memory", "2GB", "--json"]) == 0
        figures.append(json.loads(capsys.readouterr().out))
    chosen, other = figures
    assert chosen["types"].startswith("backbone q4_0 for ggml") and chosen["engine"] == "ggml"
    assert chosen["mapped"] == footprint_of(open_bundle(alone).manifest).step_nbytes > 0
    # Small ones are not prepared.
    assert other["engine"] == "onnxruntime" and other["mapped"] == 0


def test_eval_compares_bundles_of_two_engines(
    tiny_bundle: Path, tiny_gguf: Path, text: Path, capsys: Capture
) -> None:
    found = evaluate(tiny_gguf, text, against=tiny_bundle)
    assert found.engine == "ggml" and found.divergence is not None
    assert found.divergence.reference_engine == "onnxruntime"
    assert found.divergence.mean < 1e-2  # rows of 32 and of 8 bits
    arguments = ["--text", str(text), "--engine", "ggml", "--against", str(tiny_gguf)]
    assert main(["eval", str(tiny_gguf), *arguments]) == 0
    out = capsys.readouterr().out
    assert "computed by ggml" in out and f"reference {tiny_gguf} on ggml" in out


NO_ONNXRUNTIME = """
import importlib.util, sys
sys.modules["onnxruntime"] = None  # importing it raises
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "onnxruntime" else real(name, *rest)
"""
USES = {
    "load": "model = stem_edge.load({0!r}); model.generate_text('The', max_new_tokens=2)",
    "memory_plan": "stem_edge.memory_plan({0!r})",
    "fit": "from stem_edge.commands.main import main; sys.exit(main(['fit', {0!r}]))",
    "evaluate": "stem_edge.evaluate({0!r}, {1!r})",
    "measure": "stem_edge.measure({0!r}, prompt_tokens=8, new_tokens=2)",
}


@pytest.mark.parametrize("name", USES)
def test_without_onnxruntime_everything_runs_on_ggml(
    name: str, tiny_gguf: Path, text: Path
) -> None:
    code = f"{NO_ONNXRUNTIME}\nimport stem_edge\n{USES[name].format(str(tiny_gguf), str(text))}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
