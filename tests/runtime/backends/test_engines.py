"""Choice of the engine for a bundle, and the errors if there is none."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from loading import load_fixed

from stem_edge.bundle.opening import open_bundle
from stem_edge.commands.main import main
from stem_edge.errors import BackendError, InputError
from stem_edge.graph.formats import GGUF
from stem_edge.runtime.backends.engines import choose_engine


def greedy(bundle: Path, **options: Any) -> tuple[str, str]:
    with load_fixed(bundle, **options) as model:
        text = model.generate_text("Once", max_new_tokens=12)
        assert model.stats.engine == model.plan.engine
        return model.plan.engine, text


def test_the_bundle_decides(tiny_bundle: Path, tiny_gguf: Path) -> None:
    assert greedy(tiny_bundle)[0] == "onnxruntime"
    assert greedy(tiny_gguf)[0] == "ggml"


def test_what_is_not_installed_is_named(tiny_bundle: Path, tiny_gguf: Path) -> None:
    for package, bundle, said in (
        ("llama_cpp", tiny_gguf, r"ggml.*not installed.*stem-edge\[gguf\]"),
        ("onnxruntime", tiny_bundle, r"onnxruntime cannot be imported.*pip install"),
    ):
        code = f"import sys; sys.modules[{package!r}] = None\nimport stem_edge\nstem_edge.load(sys.argv[1])"
        command = [sys.executable, "-c", code, str(bundle)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert re.search("BackendError: .*" + said, done.stderr), done.stderr


def test_a_missing_backbone(tiny_bundle: Path, tiny_gguf: Path) -> None:
    with pytest.raises(
        BackendError,
        match=r"no backbone for ggml.*only for onnxruntime.*export CHECKPOINT OUT --engine ggml",
    ):
        choose_engine(open_bundle(tiny_bundle), "ggml")
    with pytest.raises(BackendError, match=r"no backbone for onnxruntime.*only for ggml"):
        load_fixed(tiny_gguf, engine="onnxruntime")


def test_options_of_the_other_engine(tiny_gguf: Path) -> None:
    with pytest.raises(InputError, match="provider: not supported by the engine in use, ggml"):
        load_fixed(tiny_gguf, engine="ggml", provider="cuda")


def damaged(bundle: Path, tmp_path: Path, at: int, value: bytes) -> Path:
    """Copy a bundle and overwrite some bytes of its backbone.gguf."""
    copy = shutil.copytree(bundle, tmp_path / "copy")
    with (copy / GGUF).open("r+b") as file:
        file.seek(at)
        file.write(value)
    return Path(copy)


@pytest.mark.parametrize(
    ("at", "value"), [(0, b"GGML"), (8, b"\xff" * 8), (16, b"\xff" * 8), (30, b"??")]
)
def test_a_damaged_header_changes_no_token_and_is_found(
    tiny_gguf: Path, tmp_path: Path, at: int, value: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights are read at the offsets that follow from the manifest, not from the header."""
    copy = damaged(tiny_gguf, tmp_path, at, value)
    assert greedy(copy) == greedy(tiny_gguf)
    assert main(["verify", str(copy)]) == 1
    assert GGUF in capsys.readouterr().out
