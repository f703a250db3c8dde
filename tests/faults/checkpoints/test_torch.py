"""Hostile files of torch.save: pickles with code, archives with false numbers."""

from __future__ import annotations

import pickle
import struct
import sys
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import refused
from installed import ROOT

from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.readers import read_checkpoint as read_any
from stem_edge.export.tensor_files.torch import load_tensors

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
HEAD = b"\x80\x02"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.pth"
    torch.save(TENSORS, path)
    return path


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as file:
        return {info.filename: file.read(info) for info in file.infolist()}


def written(path: Path, parts: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in parts.items():
            file.writestr(name, data)
    return path


def with_pickle(path: Path, data: bytes) -> Path:
    """The archive with other instructions, and values at the same places."""
    (before,) = (d for n, d in members(path).items() if n.endswith("data.pkl"))
    assert len(data) <= len(before)
    data = data.ljust(len(before), b".")
    content = path.read_bytes().replace(before, data)
    old, new = (struct.pack("<I", zlib.crc32(part)) for part in (before, data))
    path.write_bytes(content.replace(old, new))
    return path


def not_loaded(path: Path, *naming: str, seconds: float = 10) -> str:
    return refused(
        lambda: load_tensors(path), CheckpointError, path, *naming, kept=[path], seconds=seconds
    )


class Gadget:
    """Unpickling it would create a file."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


def test_the_file_that_is_damaged_below_is_read(good: Path) -> None:
    found = load_tensors(good)
    assert found["a"].rows(1, 2).tolist() == [[3.0, 4.0, 5.0]]
    assert found["b"].rows(0, 4).tolist() == [1.0] * 4


@pytest.mark.parametrize("suffix", ["pt", "bin", "ckpt"])
def test_c1_a_bare_pickle_is_refused_by_its_first_bytes(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"model.{suffix}"
    path.write_bytes(pickle.dumps({"model": Gadget(tmp_path / "hacked")}))
    not_loaded(path, "a bare pickle, which can carry code", "safetensors")
    refused(lambda: read_any(path), CheckpointError, path, kept=[tmp_path])
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.ckpt", "x.pkl"])
def test_c1_a_folder_of_pickles_says_what_to_do(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(pickle.dumps([1]))
    refused(lambda: read_any(tmp_path), CheckpointError, name, "save the model as safetensors")


GADGETS = {
    "system": b"cposix\nsystem\n(X\x02\0\0\0idtR.",
    "eval": b"c__builtin__\neval\n(X\x01\0\0\x001tR.", "load": b"ctorch\nload\n(X\x01\0\0\0xtR.",
    "a module inside of a name": b"cos system\npopen\n)R.",
    "by the stack": b"\x8c\x02os\x8c\x06system\x93)R.", "an instance": b"(ios\nsystem\n.",
    "by number": b"\x82\x01.",
    "a getter of attributes": b"cbuiltins\ngetattr\n(ctorch\nstorage\nX\x04\0\0\0_osatR.",
    "a dict of state": HEAD + b"ccollections\nOrderedDict\n)R}X\x09\0\0\0__class__cos\nsystem\nsb.",
}  # fmt: skip


@pytest.mark.parametrize("case", GADGETS)
def test_c3_a_crafted_pickle_in_an_archive_is_never_run(good: Path, case: str) -> None:
    not_loaded(with_pickle(good, GADGETS[case]), "not readable as plain tensors")


def test_c3_what_a_pickle_would_run_is_named(good: Path) -> None:
    not_loaded(with_pickle(good, GADGETS["system"]), "it names posix.system, which no tensor needs")


# Bytes of the pickle of "a", a tensor [2, 3] with strides [3, 1] -> other bytes.
CLAIMS = {
    "more rows": (b"K\x02K\x03\x86", b"K\x03K\x03\x86"),
    "one row for many": (b"K\x02K\x03\x86q\x08K\x03", b"K\x09K\x03\x86q\x08K\x00"),
    "a longer step": (b"K\x03K\x01\x86q", b"K\x09K\x01\x86q"),
    "no such values": (b"\x01\0\0\x000", b"\x01\0\0\x007"),
}


@pytest.mark.parametrize("case", CLAIMS)
def test_c8_tensors_that_claim_other_values_than_they_have(good: Path, case: str) -> None:
    data = next(data for name, data in members(good).items() if name.endswith("data.pkl"))
    before, after = CLAIMS[case]
    assert before in data
    not_loaded(with_pickle(good, data.replace(before, after, 1)))


UNSAFE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def test_c4_nothing_else_in_the_package_unpickles_or_evaluates() -> None:
    """torch.py loads weights only."""
    import ast

    calls = {"eval", "exec", "compile", "__import__"}
    paths = [p for f in ("stem_edge", "export", "runtime") for p in (ROOT / f).rglob("*.py")]
    assert len(paths) > 100
    words = *UNSAFE, *(f"{call}(" for call in calls), "allow_pickle", "torch.load("
    for path in paths:
        if not any(word in (text := path.read_text("utf-8")) for word in words):
            continue  # unparsed, which takes a hundredth of the time
        assert text.count("torch.load(") == (path.name == "torch.py"), path
        assert text.count("torch.load(") == text.count("weights_only=True"), path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                assert not UNSAFE & {alias.name.split(".")[0] for alias in node.names}, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in UNSAFE, path
            elif isinstance(node, ast.Call):
                named = node.func.id if isinstance(node.func, ast.Name) else ""
                assert named not in calls, f"{path}:{node.lineno}"
                for keyword in node.keywords:
                    value = getattr(keyword.value, "value", None)
                    assert (keyword.arg, value) not in (
                        ("allow_pickle", True),
                        ("weights_only", False),
                    )


@pytest.mark.parametrize("keep", [0, 1, 4, 100, -1, -22, -100])
def test_c10_a_truncated_archive_is_named(good: Path, keep: int) -> None:
    good.write_bytes(good.read_bytes()[:keep])
    not_loaded(good, "copy it again")


@pytest.mark.parametrize("case", ["compressed", "bytes before", "bytes after"])
def test_c16_archives_that_torch_does_not_write(good: Path, case: str) -> None:
    match case:
        case "compressed":
            written(good, members(good), zipfile.ZIP_DEFLATED)
        case "bytes before":
            good.write_bytes(b"MZ" + good.read_bytes())
        case "bytes after":
            good.write_bytes(good.read_bytes() + bytes(70_000))
    not_loaded(good)


@pytest.mark.parametrize("version", ["1.13.1", "2.9.1+cu128", "odd"])
def test_releases_of_torch_that_are_not_safe_are_refused(
    good: Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    not_loaded(good, f"torch is {version}; expected 2.10 or newer")


def test_without_torch_the_extra_is_named(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    not_loaded(good, "needs torch", "pip install 'stem-edge[torch]'", "safetensors")
