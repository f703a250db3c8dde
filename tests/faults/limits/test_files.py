"""Small files that are written completely or not at all, and other things in their place."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from contract import judged, refused
from faulty_disk import Failing, watch
from open_files import DATA, open_files, posix

from stem_edge.errors import BundleError
from stem_edge.files import disk, plain_files
from stem_edge.files.disk import write_whole
from stem_edge.files.plain_files import PlainFolders, check_file, not_plain, read_plain, remedy_for

# Small files that are there whole or not at all

STEPS = ["create", "write", "fsync", "close", "rename", "sync_folder"]


def changes(monkeypatch: pytest.MonkeyPatch, failing: str = "") -> list[str]:
    """Record the calls that change the disk, and make one kind of them fail."""
    done = list[str]()

    def note(name: str) -> None:
        done.append(name)
        if name == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    watch(monkeypatch, [*STEPS, "remove"], note)
    return done


@pytest.mark.parametrize("durable", [True, False])
def test_a_whole_file_is_written_in_this_order(
    file: Path, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = changes(monkeypatch)
    write_whole(file, b"new", durable=durable)
    assert done == [s for s in STEPS if durable or s not in ("fsync", "sync_folder")]
    assert (file.read_bytes(), list(file.parent.iterdir())) == (b"new", [file])


@pytest.mark.parametrize("step", ["create", "write", "fsync", "rename"])
def test_a_step_that_fails_leaves_the_old_file_and_nothing_else(
    file: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes(monkeypatch, step)
    before = open_files()
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        write_whole(file, b"new", durable=True)
    assert (file.read_bytes(), list(file.parent.iterdir())) == (DATA, [file])
    assert open_files() <= before


def test_the_first_error_is_the_one_that_is_reported(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch(monkeypatch, ["rename"], Failing(0, errno.ENOSPC))
    watch(monkeypatch, ["remove"], Failing(0, errno.EIO))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        write_whole(file, b"new")
    assert file.read_bytes() == DATA


def test_the_name_beside_is_hidden_and_by_chance(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, rename = list[str](), disk.rename

    def noted(source: Path, target: Path) -> None:
        names.append(source.name)
        assert (source.parent, target) == (file.parent, file)
        rename(source, target)

    monkeypatch.setattr(disk, "rename", noted)
    write_whole(file, b"a")
    write_whole(file, b"b")
    assert len(set(names)) == 2
    assert all(len(n) == 21 and n[0] == "." and n.endswith(".tmp") for n in names)


# What stands in the place of a file


@posix
@pytest.mark.parametrize(
    ("make", "kind", "remedy"),
    [
        (lambda path: path.symlink_to("nowhere"), "a link", "cp -rL"),
        (lambda path: path.mkdir(), "a folder", "export it again"),
        (lambda path: os.mkfifo(path), "a pipe", "export it again"),
        (lambda path: path.write_bytes(b""), "a file", "export it again"),
        (lambda path: None, "gone by now", "export it again"),
    ],
)
def test_what_is_there_is_said(
    tmp_path: Path, make: Callable[[Path], None], kind: str, remedy: str
) -> None:
    make(path := tmp_path / "x")
    message = str(not_plain(path))
    assert f"not a regular file (it is {kind})" in message
    assert remedy in message
    assert ("cp -rL" in message) == (kind == "a link")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (stat.S_IFSOCK, "a socket"), (stat.S_IFCHR, "a device"), (stat.S_IFBLK, "a device"),
        (0, "something else"),
    ],
)  # fmt: skip
def test_kinds_that_not_every_user_can_make(
    kind: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "lstat", lambda path: SimpleNamespace(st_mode=kind | 0o600))
    assert f"(it is {said})" in str(not_plain(Path("x"), "folder"))


REMEDIES = {
    errno.EMFILE: "ulimit -n", errno.ENFILE: "ulimit -n", errno.EACCES: "permissions",
    errno.EPERM: "permissions", errno.ENOMEM: "ulimit -v", errno.EIO: "storage device",
    errno.ENODEV: "storage device", errno.ESTALE: "storage device", errno.ENOENT: "incomplete",
}  # fmt: skip


@pytest.mark.parametrize("number", REMEDIES)
def test_each_error_of_the_system_has_its_remedy(
    number: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert REMEDIES[number] in remedy_for(OSError(number, "x"))
    assert len({remedy_for(OSError(n, "x")) for n in REMEDIES}) == len(set(REMEDIES.values()))
    watch(monkeypatch, ["open_file"], Failing(0, number, for_ever=True))
    refused(lambda: plain_files.open_plain(file, "x"), BundleError, file, REMEDIES[number])
    refused(lambda: read_plain(file, 9, "x"), BundleError, file, REMEDIES[number])
    monkeypatch.setattr(Path, "lstat", lambda path: Failing(0, number)("lstat"))
    refused(lambda: check_file(file, 10), BundleError, file, REMEDIES[number])
    refused(lambda: plain_files.check_folder(file), BundleError, file, REMEDIES[number])


@posix
def test_something_else_is_refused_by_what_opens_and_what_reads(tmp_path: Path) -> None:
    (pipe := tmp_path / "pipe").parent.mkdir(exist_ok=True)
    os.mkfifo(pipe)
    refused(lambda: plain_files.open_plain(pipe, "x"), BundleError, pipe, "a pipe")
    refused(lambda: read_plain(pipe, 9, "x"), BundleError, pipe, "a pipe")
    refused(lambda: check_file(pipe, 0), BundleError, pipe, "a pipe")
    refused(lambda: plain_files.check_folder(pipe), BundleError, pipe, "not a folder")


@pytest.mark.parametrize(("nbytes", "valid"), [(9, False), (10, True), (11, False)])
def test_the_size_of_a_file(file: Path, nbytes: int, valid: bool) -> None:
    judged(lambda: check_file(file, nbytes), valid, BundleError, file, f"10 bytes found, {nbytes}")


def test_each_folder_is_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Path]()
    monkeypatch.setattr(plain_files, "check_folder", seen.append)
    folders = PlainFolders(tmp_path)
    for name in ("file", "a/file", "a/b/file", "a/b/other", "c/file"):
        folders.check(tmp_path / name)
    assert seen == [tmp_path / "a", tmp_path / "a" / "b", tmp_path / "c"]
