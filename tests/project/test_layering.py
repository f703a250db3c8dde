"""Cost of imports, and forbidden code. The import contracts are in pyproject.toml."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from installed import ROOT


def test_one_room_opens_sessions() -> None:
    """Sessions with other settings would compute other numbers on some processors."""
    paths = [
        path
        for folder in ("stem_edge", "export", "runtime", "tests", "tools")
        for path in (ROOT / folder).rglob("*.py")
        if "InferenceSession" + "(" in path.read_text("utf-8")
    ]
    assert {path.parent for path in paths} == {ROOT / "runtime/backends/onnxruntime/providers"}


def loaded_after(code: str) -> set[str]:
    script = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not loaded_after("import stem_edge") & {"numpy", "torch", "onnxruntime", "tokenizers"}


@pytest.mark.parametrize("name", ["eval", "fit", "measure"])
def test_measuring_needs_no_extra(name: str) -> None:
    loaded = loaded_after(f"import stem_edge.commands.measuring.{name}")
    assert not loaded & {"torch", "onnx", "zarr", "llama_cpp"}


def test_exporting_loads_neither_torch_nor_the_trainers_tokenizers() -> None:
    loaded = loaded_after("import stem_edge.export.exporter")
    assert not loaded & {"torch", "transformers", "onnx", "sentencepiece"}


def test_generating_loads_neither_torch_nor_onnx_nor_zarr() -> None:
    code = (
        "from stem_edge.commands.running.demo import demo_bundle\nimport stem_edge\n"
        "with stem_edge.load(demo_bundle()) as model: model.generate_text('The', max_new_tokens=2)"
    )
    loaded = loaded_after(code)
    assert {"numpy", "onnxruntime"} <= loaded
    assert not loaded & {"torch", "onnx", "zarr", "transformers"}
