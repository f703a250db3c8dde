"""Renaming and syncing files and folders, on every system."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from open_files import open_files, posix

from stem_edge.files import disk
from stem_edge.files.trees import remove_tree


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
