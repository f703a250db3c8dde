"""Hostile files of torch.save: pickles with code, archives with false numbers."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import refused
from installed import ROOT
from make_checkpoint import Shape, write_checkpoint

from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.lingua import read_checkpoint
from stem_edge.export.checkpoints.readers import read_checkpoint as read_any
from stem_edge.export.tensor_files.torch import load_tensors

TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
HEAD, TENSOR = b"\x80\x02", b"ctorch._utils\n_rebuild_tensor_v2\n"


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
    """The archive with other instructions."""
    return written(
        path, {n: data if n.endswith("data.pkl") else d for n, d in members(path).items()}
    )


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
    written(good, members(good))  # as another program writes the same archive
    assert load_tensors(good)["a"].rows(0, 1).tolist() == [[0.0, 1.0, 2.0]]


def test_views_of_the_same_values_are_read_as_they_lie(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    views = {"turned": whole.T, "columns": whole[:, 2:5], "rows": whole[1:3], "all": whole}
    torch.save(views, tmp_path / "views.pth")
    found = load_tensors(tmp_path / "views.pth")
    for name, view in views.items():
        assert found[name].rows(1, 2).tolist() == view[1:2].tolist()
        assert found[name].rows(0, 9).tolist() == view.tolist()


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


WITHOUT_END = {
    "a list that holds itself": HEAD + b"]q\0h\0a.",
    "DUP, which torch never writes": HEAD + b"]" + b"2\x86" * 90 + b".",
    "doubled": HEAD + b"]q\0" + b"".join(b"h%ch%c\x86q%c" % (n, n, n + 1) for n in range(90)) + b".",
    "deep": HEAD + b"N" + b"\x85" * 100_000 + b".",
    "a key that is compared for ever": HEAD + b"}" + b"]q\0" + b"h\0h\0\x86q\0" * 60 + b"Ns.",
}  # fmt: skip


@pytest.mark.parametrize("case", GADGETS | WITHOUT_END)
def test_c3_a_crafted_pickle_in_an_archive_is_never_run(good: Path, case: str) -> None:
    """There is no unpickler to get past: no name is looked up, whatever the pickle does with it."""
    not_loaded(with_pickle(good, (GADGETS | WITHOUT_END)[case]), "not readable as plain tensors")


@pytest.mark.slow
def test_c3_millions_of_instructions_are_refused_in_time(good: Path) -> None:
    not_loaded(
        with_pickle(good, HEAD + b"]" * 3_000_000 + b"."),
        "more than 2097152 instructions",
        seconds=60,
    )


UNSAFE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def test_c4_nothing_in_the_package_unpickles_or_evaluates() -> None:
    """Nothing can fall back to it, either."""
    import ast

    calls = {"eval", "exec", "compile", "__import__"}
    paths = [p for f in ("stem_edge", "export", "runtime") for p in (ROOT / f).rglob("*.py")]
    assert len(paths) > 100
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
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
        assert "torch.load" not in path.read_text("utf-8"), path


@pytest.mark.parametrize("keep", [0, 1, 4, 100, -1, -22, -100])
def test_c10_a_truncated_archive_is_named(good: Path, keep: int) -> None:
    good.write_bytes(good.read_bytes()[:keep])
    not_loaded(
        good,
        "truncated or was changed" if keep not in (0, 1) else "not an archive",
        "copy it again",
    )


def test_c10_wrong_bytes_of_the_right_size_do_not_match_their_checksum(good: Path) -> None:
    data = bytearray(good.read_bytes())
    at = data.index(TENSORS["a"].numpy().tobytes())
    data[at + 5] ^= 1
    good.write_bytes(data)
    found = load_tensors(good)
    assert found["b"].rows(0, 4).tolist() == [1.0] * 4
    refused(lambda: found["a"].rows(0, 1), CheckpointError, good, "checksum", "copy it again")


@pytest.mark.parametrize(
    ("around", "said"), [((b"MZ", b""), "not an archive"), ((b"", b"x"), "end")]
)
def test_c16_bytes_around_an_archive(good: Path, around: tuple[bytes, bytes], said: str) -> None:
    good.write_bytes(around[0] + good.read_bytes() + around[1])
    not_loaded(good, said)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_c16_members_of_the_same_name(good: Path) -> None:
    parts = members(good)
    with zipfile.ZipFile(good, "w") as file:
        for name, data in [*parts.items(), ("good/data/0", bytes(24))]:
            file.writestr(name, data)
    not_loaded(good, "has two members")


def test_c3_an_index_of_a_distributed_checkpoint_is_data_too(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "run", Shape())
    for data in (
        *GADGETS.values(),
        b"",
        pickle.dumps({}),
        pickle.dumps(Gadget(tmp_path / "hacked")),
    ):
        (folder / ".metadata").write_bytes(data)
        refused(lambda: read_checkpoint(folder), CheckpointError, folder / ".metadata")
    assert not (tmp_path / "hacked").exists()


def test_c10_a_piece_of_a_distributed_checkpoint_that_is_another(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "run", Shape())
    path = next(folder.glob("*.distcp"))
    stream = io.BytesIO()
    torch.save(torch.zeros(3), stream)
    data = bytearray(path.read_bytes())
    data[: len(stream.getvalue())] = stream.getvalue()
    path.write_bytes(data)
    refused(lambda: read_checkpoint(folder), CheckpointError, path, "copy it again")
