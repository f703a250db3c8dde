"""The seam to the file system: every answer of a system, and limits from both sides."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from open_files import DATA, open_files, posix

from stem_edge.files import disk
from stem_edge.files.lock import lock
from stem_edge.files.plain_files import read_at

# Opening


@pytest.mark.parametrize("number", [errno.ELOOP, errno.EMLINK, errno.ENXIO])
def test_errors_of_systems_for_links_and_sockets(
    file: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(disk.NotRegularError):
        disk.open_file(file)


@posix
def test_only_a_regular_file_is_updated(file: Path) -> None:
    os.mkfifo(other := file.with_name("other"))
    before = open_files()
    with pytest.raises(disk.NotRegularError, match="not a regular file"):
        disk.update(other)
    assert open_files() <= before


@posix
def test_who_may_read_a_new_file_is_up_to_the_user(tmp_path: Path) -> None:
    before = os.umask(0o020)
    try:
        disk.close(disk.create(tmp_path / "file"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o646


# Reading


@pytest.mark.parametrize("positional", [True, False])
@pytest.mark.parametrize(("offset", "length"), [(0, 10), (3, 4), (8, 9), (10, 1), (99, 1), (0, 0)])
def test_reading_from_a_place(
    file: Path, positional: bool, offset: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not positional:
        monkeypatch.delattr(os, "preadv", raising=False)
    descriptor = disk.open_file(file)
    for call in (disk.pread, disk.fill):
        buffer = bytearray(b"\xff" * length)
        expected = DATA[offset : offset + length]
        assert call(descriptor, memoryview(buffer), offset) == len(expected)
        assert buffer == expected.ljust(length, b"\xff")
    assert read_at(descriptor, length, offset) == DATA[offset : offset + length]
    if positional and hasattr(os, "preadv"):  # because threads share the file position
        assert os.lseek(descriptor, 0, os.SEEK_CUR) == 0
    disk.close(descriptor)


# Writing


@posix
def test_a_file_is_locked_for_one(file: Path) -> None:
    one, other = disk.update(file), disk.update(file)
    assert lock(one) and not lock(other)
    disk.close(one)
    assert lock(other)
    disk.close(other)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        lock(other)


def test_a_device_that_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "write", lambda descriptor, data: 0)
    with pytest.raises(OSError, match="takes no more bytes") as caught:
        disk.write_all(1, b"x")
    assert caught.value.errno == errno.EIO
