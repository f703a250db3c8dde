"""Reads regular files of a bundle, and refuses links, pipes and devices.

A link, even to a folder, could lead to any file of this machine, and reading a pipe could take for
ever. Hard links are allowed, and so are the links of a model hub's cache (hub_links.py).
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TypeVar

import msgspec

from stem_edge.errors import BundleError
from stem_edge.files import disk
from stem_edge.shown import one_line

_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFREG: "a file",
}

T = TypeVar("T")
COPY_AGAIN = "copy or export the bundle again"


def damaged(path: Path, said: str) -> BundleError:
    """Return the error for a damaged file of a bundle. said: what is wrong with the file."""
    return BundleError(f"{path}: {said}; {COPY_AGAIN}")


def not_plain(path: Path, wanted: str = "regular file") -> BundleError:
    """Return the error for a path that is not a `wanted` ("regular file" or "folder")."""
    try:
        kind = _KINDS.get(stat.S_IFMT(path.lstat().st_mode), "something else")
    except OSError:
        kind = "gone by now"
    # Links get special advice, because copies of a hub's cache consist of them.
    remedy = (
        "copy the bundle as plain files, cp -rL BUNDLE COPY, and use the copy"
        if kind == "a link"
        else "copy the bundle as plain files from its source or export it again"
    )
    return BundleError(f"{path}: not a {wanted} (it is {kind}); {remedy}")


def remedy_for(error: OSError) -> str:
    """Return advice for the user about a file that cannot be opened or read."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files (ulimit -n)"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "check the permissions of the file and its folders"
    if error.errno == errno.ENOMEM:
        return "raise the limit of memory (ulimit -v)"
    if error.errno in (errno.EIO, errno.ENODEV, errno.ESTALE):
        return "check the storage device, then copy or export the bundle again"
    return "the bundle is incomplete: copy or export it again"


def open_plain(path: Path, noun: str) -> int:
    """Open a regular file for reading. Raises BundleError, which calls it `noun`, like "index"."""
    try:
        return disk.open_file(path)
    except OSError as error:
        raise unreadable(path, noun, error) from error


def read_plain(path: Path, limit: int, noun: str) -> bytes:
    """Read at most `limit` + 1 bytes of a file. Raises BundleError, which calls the file `noun`."""
    try:
        return disk.read_file(path, limit)
    except OSError as error:
        raise unreadable(path, noun, error) from error


def unreadable(path: Path, noun: str, error: OSError) -> BundleError:
    """Return the error for a file that is unreadable or not regular. noun: word for the file."""
    if isinstance(error, disk.NotRegularError):
        return not_plain(path)
    return BundleError(f"{path}: cannot read this {noun} ({error.strerror}); {remedy_for(error)}")


def decode_json(data: bytes, type: type[T], most: int) -> T:
    """Decode JSON of at most `most` bytes as `type`. Raises ValueError with a one-line message."""
    try:
        if len(data) > most:
            raise ValueError(f"larger than {most} bytes")
        return msgspec.json.decode(data, type=type)
    except (ValueError, RecursionError) as error:  # errors of msgspec and of UTF-8 are ValueErrors
        raise ValueError(one_line(error)) from error


def read_at(descriptor: int, nbytes: int, offset: int) -> bytearray:
    """Read `nbytes` bytes from `offset` on; fewer only at the end of the file. Raises OSError."""
    buffer = bytearray(nbytes)
    with memoryview(buffer) as view:
        count = disk.fill(descriptor, view, offset)
    del buffer[count:]
    return buffer


def check_folder(path: Path) -> None:
    """Raise BundleError unless the path is a folder. A link to a folder is refused."""
    try:
        status = path.lstat()
    except OSError as error:
        raise unreadable(path, "folder", error) from error
    if not stat.S_ISDIR(status.st_mode):
        raise not_plain(path, "folder")


def check_file(path: Path, nbytes: int) -> None:
    """Raise BundleError unless the path is a regular file of `nbytes` bytes."""
    try:
        status = disk.status(path)
    except OSError as error:
        raise unreadable(path, "file", error) from error
    check_status(path, status, nbytes)


def check_status(path: Path, status: os.stat_result, nbytes: int) -> None:
    """Raise BundleError unless `status` describes a regular file of `nbytes` bytes."""
    if not stat.S_ISREG(status.st_mode):
        raise not_plain(path)
    if status.st_size != nbytes:
        raise damaged(path, f"{status.st_size} bytes found, {nbytes} expected")


def check_folders(root: Path, path: Path, seen: set[Path]) -> None:
    """Raise BundleError if a folder between `root` and `path` is a link. seen: checked folders."""
    folder = root
    for part in path.relative_to(root).parts[:-1]:
        folder /= part
        if folder not in seen:
            check_folder(folder)
            seen.add(folder)
