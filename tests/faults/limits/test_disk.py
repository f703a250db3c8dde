"""The seam to the file system: every answer of a system, and limits from both sides."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from open_files import DATA, open_files, posix

from stem_edge.files import disk
from stem_edge.files.lock import lock
from stem_edge.files.plain_files import read_at, read_plain

# Opening


@posix
@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.mkdir(), lambda path: os.mkfifo(path),
        lambda path: path.symlink_to(path.with_name("file")),
        lambda path: path.symlink_to("nowhere"), lambda path: path.symlink_to("/dev/null"),
    ],
)  # fmt: skip
def test_only_a_regular_file_is_opened(file: Path, make: Callable[[Path], None]) -> None:
    make(other := file.with_name("other"))
    before = open_files()
    for call in (disk.open_file, lambda path: disk.read_file(path, 1)):
        with pytest.raises(disk.NotRegularError, match="not a regular file") as caught:
            call(other)
        assert (caught.value.errno, caught.value.filename) == (errno.EINVAL, str(other))
    assert open_files() <= before


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
def test_a_link_is_recognized_on_every_system(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EACCES, "Permission denied")

    (link := file.with_name("link")).symlink_to(file)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(disk.NotRegularError):
        disk.open_file(link)
    with pytest.raises(PermissionError):
        disk.open_file(file)


@posix
def test_only_a_regular_file_is_updated(file: Path) -> None:
    os.mkfifo(other := file.with_name("other"))
    before = open_files()
    with pytest.raises(disk.NotRegularError, match="not a regular file"):
        disk.update(other)
    assert open_files() <= before


def test_new_files_are_new_and_others_are_continued(file: Path) -> None:
    with pytest.raises(FileExistsError):
        disk.create(file)
    with pytest.raises(FileNotFoundError):
        disk.append(file.with_name("other"))
    descriptor = disk.append(file)
    assert disk.write(descriptor, memoryview(b"\r\n")) == 2
    disk.close(descriptor)
    assert file.read_bytes() == DATA + b"\r\n"
    descriptor = disk.create(file.with_name("other"))
    disk.write_all(descriptor, b"\n")
    disk.fsync(descriptor)
    assert disk.size(descriptor) == 1
    disk.close(descriptor)
    with pytest.raises(OSError, match=r"."):
        disk.close(descriptor)
    assert file.with_name("other").read_bytes() == b"\n"


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


@pytest.mark.parametrize(("limit", "found"), [(11, 10), (10, 10), (9, 10), (8, 9), (0, 1)], ids=str)
def test_a_small_file_or_one_byte_more_than_the_limit(file: Path, limit: int, found: int) -> None:
    before = open_files()
    assert disk.read_file(file, limit) == DATA[:found]
    assert read_plain(file, limit, "file") == DATA[:found]
    assert open_files() <= before


# Writing


@pytest.mark.parametrize("data", [b"", DATA, bytearray(DATA), memoryview(DATA)])
@pytest.mark.parametrize("most", [1, 3, 99])
def test_every_byte_is_written(
    tmp_path: Path, data: bytes, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = disk.write
    monkeypatch.setattr(disk, "write", lambda file, data: write(file, data[:most]))
    descriptor = disk.create(tmp_path / "file")
    disk.write_all(descriptor, data)
    disk.close(descriptor)
    assert (tmp_path / "file").read_bytes() == data


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
