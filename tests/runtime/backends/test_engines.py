"""Choice of the engine for a bundle, and the errors if there is none."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loading import load_fixed
from toy_engine import ToyLoader, toy_engine

import stem_edge
from stem_edge.bundle.manifest import GGUF
from stem_edge.bundle.opening import open_bundle
from stem_edge.commands.main import main
from stem_edge.errors import BackendError, InputError
from stem_edge.runtime.backends.engines import ENGINES, choose_engine


def greedy(bundle: Path, **options: Any) -> tuple[str, str]:
    with load_fixed(bundle, **options) as model:
        text = model.generate_text("Once", max_new_tokens=12)
        assert model.stats.engine == model.plan.engine
        return model.plan.engine, text


def test_the_bundle_decides(tiny_bundle: Path, tiny_gguf: Path) -> None:
    assert greedy(tiny_bundle)[0] == "onnxruntime"
    assert greedy(tiny_gguf)[0] == "ggml"


def test_what_is_not_installed_is_named(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = replace(ENGINES["ggml"], installed=lambda: False)
    monkeypatch.setitem(ENGINES, "ggml", absent)
    names: list[str] = ["auto", "ggml"]
    for name in names:
        with pytest.raises(BackendError, match=r"ggml is not installed.*stem-edge\[gguf\]"):
            load_fixed(tiny_gguf, engine=name)


def test_a_missing_backbone(tiny_bundle: Path, tiny_gguf: Path) -> None:
    with pytest.raises(
        BackendError,
        match=r"no backbone for ggml.*only for onnxruntime.*export CHECKPOINT OUT --engine ggml",
    ):
        choose_engine(open_bundle(tiny_bundle), "ggml")
    with pytest.raises(BackendError, match=r"no backbone for onnxruntime.*only for ggml"):
        load_fixed(tiny_gguf, engine="onnxruntime")


@pytest.mark.parametrize(
    ("engine", "option", "value"),
    [
        ("ggml", "provider", "cuda"),
        ("onnxruntime", "repack", True),
    ],
)
def test_options_of_the_other_engine(
    tiny_bundle: Path, tiny_gguf: Path, engine: str, option: str, value: Any
) -> None:
    options, bundle = {option: value}, tiny_gguf if engine == "ggml" else tiny_bundle
    said = f"{option}: not supported by the engine in use, {engine}"
    with pytest.raises(InputError, match=said):
        load_fixed(bundle, engine=engine, **options)


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
    assert GGUF in capsys.readouterr().err


def test_generating_on_ggml_loads_no_onnxruntime(tiny_gguf: Path) -> None:
    code = (
        "import sys; sys.modules['onnxruntime'] = None\n"
        "import stem_edge\n"
        f"with stem_edge.load({str(tiny_gguf)!r}) as model:\n"
        "    print(model.plan.engine, len(model.generate_text('Once', max_new_tokens=3)) > 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["ggml", "True"], done.stderr


def test_the_command_says_which_engine_it_was(
    tiny_bundle: Path, tiny_gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, bundle in (("onnxruntime", tiny_bundle), ("ggml", tiny_gguf)):
        assert main(["generate", str(bundle), "-p", "Once", "-n", "4", "--engine", name]) == 0
        assert f"{name}: prompt" in capsys.readouterr().err


def test_a_new_engine_is_a_loader_and_an_entry(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything else works with it, including the commands."""
    real = greedy(tiny_bundle)
    toy = toy_engine(ToyLoader)
    monkeypatch.setitem(ENGINES, "onnxruntime", toy)
    texts = [
        greedy(tiny_bundle, slots=slots, overlap=overlap)
        for slots, overlap in ((8, True), (8, False), (300, True))
    ]
    assert len(set(texts)) == 1 and texts[0] != real
    assert stem_edge.memory_plan(tiny_bundle).weights == 1000
    assert main(["generate", str(tiny_bundle), "-p", "Once", "-n", "12"]) == 0
    assert capsys.readouterr().out.strip() == texts[0][1].strip()
    with load_fixed(tiny_bundle) as model:
        assert "toy: 7" in model._prefixes.fingerprint  # not the version of onnxruntime
    monkeypatch.setitem(ENGINES, "onnxruntime", replace(toy, installed=lambda: False))
    with pytest.raises(BackendError, match=r"onnxruntime is not installed.*pip install toy"):
        load_fixed(tiny_bundle)
