"""Renaming, exchanging and syncing files and folders, on every system."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from open_files import DATA, open_files, posix

from stem_edge.files import disk, exchange
from stem_edge.files.trees import make_folders, remove_tree

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux exchanges names")


def test_names_are_changed(file: Path, tmp_path: Path) -> None:
    disk.make_folder(tmp_path / "folder")
    with pytest.raises(FileExistsError):
        disk.make_folder(tmp_path / "folder")
    (tmp_path / "folder" / "second").hardlink_to(file)
    assert (tmp_path / "folder" / "second").samefile(file)
    with pytest.raises(OSError, match=r"."):
        disk.remove_folder(tmp_path / "folder")
    (other := tmp_path / "other").write_bytes(b"x")
    disk.rename(other, file)
    assert (file.read_bytes(), other.exists()) == (b"x", False)
    disk.remove(tmp_path / "folder" / "second")
    disk.remove_folder(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == [file]


@linux
def test_names_are_exchanged_at_once(file: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "folder").mkdir()
    if not disk.exchange(file, folder):
        pytest.skip("this file system cannot exchange names")
    assert (file.is_dir(), folder.read_bytes()) == (True, DATA)
    with pytest.raises(FileNotFoundError) as caught:
        disk.exchange(file, tmp_path / "missing")
    error = caught.value
    assert (error.filename, error.filename2) == (str(file), str(tmp_path / "missing"))


def test_what_linux_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """AT_FDCWD and RENAME_EXCHANGE, of its headers."""
    renameat2 = Mock(return_value=0)
    monkeypatch.setattr(exchange, "renameat2", lambda: renameat2)
    assert disk.exchange(Path("a"), Path("b"))
    renameat2.assert_called_once_with(-100, b"a", -100, b"b", 2)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_system_that_cannot_exchange(
    number: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "renameat2", lambda: lambda *_: -1)
    monkeypatch.setattr(ctypes, "get_errno", lambda: number)
    if number == errno.EIO:
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            disk.exchange(file, file)
    else:
        assert disk.exchange(file, file) is False


@pytest.mark.parametrize("error", [OSError, AttributeError])
def test_a_system_without_the_call(
    error: type[Exception], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error("none")

    monkeypatch.setattr("ctypes.CDLL", refuse)
    assert exchange.renameat2.__wrapped__() is None
    monkeypatch.undo()
    monkeypatch.setattr(
        exchange, "sys", SimpleNamespace(platform="darwin")
    )  # which is not even asked
    assert exchange.renameat2.__wrapped__() is None
    monkeypatch.setattr(exchange, "renameat2", lambda: None)
    assert disk.exchange(file, file) is False


@posix
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_folders_are_synced_where_that_is_possible(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, before = list[int](), open_files()

    def refuse(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk, "_sync", refuse)
    if number == errno.EIO:
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            disk.sync_folder(tmp_path)
        assert caught.value.filename == str(tmp_path)
    else:
        disk.sync_folder(tmp_path)
    assert (synced, open_files()) == ([tmp_path.stat().st_ino], before)


def test_windows_syncs_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "os", SimpleNamespace(name="nt"))
    disk.sync_folder(tmp_path / "missing")


@posix
def test_macos_is_asked_to_empty_the_memory_of_its_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """It falls back to fsync where the file system does not support that."""
    import fcntl

    asked = list[object]()

    def refuse(*arguments: object) -> None:
        asked.append(arguments)
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(os, "fsync", asked.append)
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    disk.fsync(7)
    monkeypatch.setattr(disk, "sys", SimpleNamespace(platform="darwin"))
    disk.fsync(8)
    assert asked == [7, 8, (8, 51)] if sys.platform != "darwin" else asked[-1] == (8, 51)


def test_a_tree_is_removed_and_no_link_is_followed(file: Path, tmp_path: Path) -> None:
    tree, outside = tmp_path / "tree", tmp_path / "outside"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "file").write_bytes(b"x")
    (tree / "last").write_bytes(b"x")
    outside.mkdir()
    (outside / "kept").write_bytes(b"x")
    if os.name == "posix":
        (tree / "link").symlink_to(outside)
        (tree / "a" / "dangling").symlink_to("nowhere")
    remove_tree(tree, tmp_path)
    assert not tree.exists()
    assert (outside / "kept").exists()


def test_folders_are_made_where_they_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, make = list[Path](), disk.make_folder

    def also_made_by_another(path: Path) -> None:
        made.append(path)
        make(path)
        if path.name == "b":
            raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(disk, "make_folder", also_made_by_another)
    make_folders(tmp_path / "a" / "b" / "c")
    make_folders(tmp_path / "a" / "b" / "c")
    assert made == [tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"]
