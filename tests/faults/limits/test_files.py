"""Small files that are written completely or not at all, and other things in their place."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from contract import refused
from faulty_disk import Failing, watch
from open_files import posix

from stem_edge.errors import BundleError
from stem_edge.files import plain_files
from stem_edge.files.plain_files import check_file, not_plain, read_plain, remedy_for

# Small files that are there whole or not at all


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
