"""Checkpoints that are loaded as they are: their bundles are made once, and are listed by `stem-edge list`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from unittest.mock import Mock

import msgspec
import pytest
from contract import refused
from gguf_files import write_model
from hf_folders import SIZES, randomized
from installed import DEMO, needs_ggml
from transformers import LlamaConfig, LlamaForCausalLM

import stem_edge
from stem_edge.bundle.hub.kept import MADE
from stem_edge.bundle.manifest import MANIFEST
from stem_edge.commands.main import main
from stem_edge.errors import (
    CheckpointError,
    ExportError,
    InputError,
    OutOfMemoryError,
    StemEdgeError,
)
from stem_edge.files import disk
from stem_edge.files import lock as locks
from stem_edge.files.lock import lock
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.first_load import made, making
from stem_edge.runtime.first_load.made import Source, made_of, name_of
from stem_edge.runtime.loading import open_or_make

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def cache(own_cache_folder: Path) -> Path:
    return own_cache_folder / "stem-edge"


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Engines of the exports so far, each of which gives the demo."""
    done: list[str] = []

    def export(checkpoint: str, bundle: Path, engine: str, show: bool | None) -> None:
        assert not bundle.exists() or (bundle / MANIFEST).exists()  # only bundles are replaced
        shutil.copytree(DEMO, bundle, dirs_exist_ok=True)
        with (bundle / MANIFEST).open("a", encoding="ascii") as manifest:
            manifest.write(" " * len(done))  # another bundle
        done.append(engine)

    monkeypatch.setattr(made, "make", export)
    return done


def one_file(folder: Path) -> Path:
    (folder / "m.gguf").write_bytes(b"GGUF")
    return folder / "m.gguf"


def small_model(folder: Path) -> Path:
    sizes = SIZES | {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96}
    model = randomized(LlamaForCausalLM(LlamaConfig(**sizes)))
    return write_model(folder / "a.gguf", model, "Q4_1")


def in_folder(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"0")
    return folder


def lingua(folder: Path) -> Path:
    (folder / "params.json").write_text("{}")
    (folder / "stem_shards").mkdir()
    return folder


def blagpt(folder: Path) -> Path:
    (folder / "state_step1.pt").touch()
    return folder


def opened(path: Path, **options: object) -> Path:
    return open_or_make(path, LoadOptions(**options)).path  # type: ignore[arg-type]


def record(cache: Path) -> Path:
    (found,) = cache.glob(f"{MADE}/*/{made.RECORD}")
    return found


def later(path: Path) -> None:
    os.utime(path, (1, 1))


def of_another_version(path: Path) -> None:
    found = msgspec.json.decode(path.read_bytes(), type=Source)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(found, version="0")))


# What happens between two loads -> checkpoint, change of (checkpoint, record), exports of both loads.
CASES: dict[str, tuple[Callable[[Path], Path], Callable[[Path, Path], object], int]] = {
    "nothing, of a file": (one_file, lambda path, record: None, 1),
    "nothing, of a folder": (in_folder, lambda path, record: None, 1),
    "a file changes": (one_file, lambda path, record: path.write_bytes(b"other"), 2),
    "a file is as long as before": (one_file, lambda path, record: later(path), 2),
    "a file of a folder changes": (
        in_folder, lambda path, record: later(path / "model.safetensors"), 2),
    "notes of a folder change": (
        in_folder, lambda path, record: (path / "notes.txt").write_text("new"), 1),
    "a tokenizer of another name changes": (
        in_folder, lambda path, record: (path / "tokenizer.bin").write_text("new"), 2),
    "the chat template changes": (
        in_folder, lambda path, record: (path / "chat_template.jinja").write_text("new"), 2),
    "another index of weights": (
        in_folder, lambda path, record: (path / "model.safetensors.index.json").touch(), 2),
    "the state of a trainer changes": (
        in_folder, lambda path, record: (path / "trainer_state.json").write_text("{}"), 1),
    "a checkpoint of a training run comes": (
        in_folder, lambda path, record: shutil.copytree(path, path / "checkpoint-500"), 1),
    "tables of Lingua change": (
        lingua, lambda path, record: (path / "stem_shards" / "stem_model_mp0.pt").write_text("new"), 2),
    "another state of BlaGPT comes": (
        blagpt, lambda path, record: (path / "state_step2.pt").touch(), 2),
    "another file is new": (
        one_file, lambda path, record: path.with_name("n.gguf").write_bytes(b""), 1),
    "a new version": (one_file, lambda path, record: of_another_version(record), 2),
    "the record is damaged": (one_file, lambda path, record: record.write_bytes(b"{"), 2),
    "the bundle is damaged": (
        one_file, lambda path, record: (record.parent / "m" / "manifest.json").unlink(), 2),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_is_made_once_for_each_state(
    case: str, tmp_path: Path, cache: Path, exports: list[str]
) -> None:
    write, change, count = CASES[case]
    path = write(tmp_path)
    first = opened(path)
    assert first.parent == record(cache).parent
    assert first.name == path.name.removesuffix(".gguf")
    change(path, record(cache))
    assert (opened(path), len(exports)) == (first, count)
    assert opened(path) == first and len(exports) == count


def test_an_interrupted_one_leaves_nothing(
    tmp_path: Path, cache: Path, exports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(checkpoint: str, bundle: Path, engine: str, show: bool | None) -> None:
        (work := bundle.with_name(".stem-edge-m")).mkdir()
        (work / "tokenizer.json").touch()
        raise KeyboardInterrupt

    path = one_file(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(made, "make", cut)
        with pytest.raises(KeyboardInterrupt):
            opened(path)
    assert not list((cache / MADE).glob("*/"))
    assert opened(path).is_dir() and len(exports) == 1


def test_a_bundle_keeps_its_record_if_the_next_export_fails(
    tmp_path: Path, cache: Path, exports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses = Mock(side_effect=CheckpointError("damaged; copy it again"))
    path = one_file(tmp_path)
    opened(path)
    path.rename(earlier := tmp_path / "earlier")
    path.write_bytes(b"other")
    with monkeypatch.context() as patch:
        patch.setattr(made, "make", refuses)
        refused(lambda: opened(path), CheckpointError, "damaged")
    earlier.replace(path)
    assert opened(path).is_dir() and len(exports) == 1


def test_two_at_once_make_it_once(
    tmp_path: Path, cache: Path, exports: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, found, said = one_file(tmp_path), list[Path](), SimpleQueue[str]()
    opened(path)
    root = record(cache).parent
    source = made_of(root)
    assert source is not None
    (root / made.RECORD).rename(root / "kept")
    making = disk.update(root.with_suffix(made.LOCK))
    assert lock(making)
    # Not by reading what is printed: what is written while pytest reads and empties its file is lost.
    monkeypatch.setattr(made, "tell", lambda text, show: said.put(text))
    thread = threading.Thread(target=lambda: found.append(opened(path)))
    thread.start()
    assert "waiting for the process that makes" in said.get(timeout=60)
    (root / "kept").rename(root / made.RECORD)
    disk.close(making)
    thread.join()
    assert found == [root / name_of(source)] and len(exports) == 1


REFUSED: dict[str, tuple[type[StemEdgeError], str]] = {
    "no cache": (ExportError, "cannot keep the bundle of"),
    "no checkpoint": (CheckpointError, "m.gguf"),
    "no process": (ExportError, "cannot start"),
    "killed": (OutOfMemoryError, "was killed"),
    "no memory": (OutOfMemoryError, "and 1 kB are free; free some, or export it"),
    "crashed": (ExportError, "ended (SIGABRT)"),
    "interrupted": (ExportError, "ended (exit status 130)"),
    "refused": (InputError, "Ctrl-C reaches it: False"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = one_file(tmp_path), tmp_path / "cache"
    if case == "no cache":
        folder.touch()
    if case == "no memory":
        (path := tmp_path / "hf").mkdir()
        (path / "config.json").write_text("{}")
        monkeypatch.setattr(made, "available_memory", lambda: 1000)
    codes = {"killed": "import os; os.kill(os.getpid(), 9)", "crashed": "import os; os.abort()"}
    codes["interrupted"] = "raise SystemExit(130)"
    told = f"InputError: {path}: try again; Ctrl-C reaches it:"
    codes["refused"] = (
        f"import os; print({told!r}, os.getsid(0) != os.getpid()); raise SystemExit(11)"
    )
    commands = {name: [sys.executable, "-c", code] for name, code in codes.items()}
    commands["no process"] = [str(tmp_path / "gone")]
    if case in commands:
        monkeypatch.setattr(making, "module_command", lambda *given: commands[case])
    error, said = REFUSED[case]
    refused(lambda: opened(path, cache_dir=folder), error, path, said, kept=[path])
    assert not [*folder.glob(f"{MADE}/*/")]


def test_ctrl_c_while_waiting_for_a_lock_or_an_export_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    path = one_file(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(locks, "lock", interrupted)
        with pytest.raises(KeyboardInterrupt):
            opened(path)
    monkeypatch.setattr(making, "module_command", lambda *_: [sys.executable, "-c", "pass"])
    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        making.make(str(path), tmp_path / "bundle", "onnxruntime", False)


def test_the_command_removes(
    tmp_path: Path, cache: Path, exports: list[str], capsys: Capture
) -> None:
    path = one_file(tmp_path)
    with stem_edge.load(path) as model:
        assert model.generate_text("The", max_new_tokens=1)
        making = disk.update(record(cache).parent.with_suffix(made.LOCK))
        assert lock(making)
        for name in ("m", str(record(cache).parent / "m")):
            assert main(["rm", name]) == 1
            assert "a process makes it" in capsys.readouterr().err
        disk.close(making)
    path.unlink()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "remove_folder"):  # as where the folder cannot be written
            patch.setattr(disk, name, Mock(side_effect=PermissionError(13, "denied")))
        assert main(["rm", "m"]) == 1 and [*cache.glob(f"{MADE}/*/m/{MANIFEST}")]
    assert main(["rm", "m"]) == 0 and not list(cache.glob(f"{MADE}/*/"))


@pytest.mark.parametrize("engine", ["onnxruntime", pytest.param("ggml", marks=needs_ggml)])
def test_a_real_file(engine: str, tmp_path: Path, capfd: Capture) -> None:
    path = small_model(tmp_path)
    command = ["generate", str(path), "Once", "-n", "2", "-q", "--engine", engine]
    texts = []
    for told in (1, 0):
        assert main(command) == 0
        out, err = capfd.readouterr()
        assert err.count("reading a.gguf to make a bundle of it, once, in") == told
        texts.append(out)
    assert texts[0] == texts[1] and main(["inspect", str(path)]) == 0
