"""Files of a bundle as plain files: what else stands in the place of one is refused, with a remedy.

A link, also one in the place of a folder, could lead to any file of this machine; a pipe could make
us wait for ever. Hard links are files like others. See stem_edge.files.disk.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from stem_edge.errors import BundleError
from stem_edge.files import disk

_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFREG: "a file",
}


COPY_AGAIN = "copy or export the bundle again"


def damaged(path: Path, said: str) -> BundleError:
    """The error for a file of a bundle that is not what was exported."""
    return BundleError(f"{path}: {said}; {COPY_AGAIN}")


def not_plain(path: Path, wanted: str = "regular file") -> BundleError:
    """The error for something else than a file, or folder, at this path."""
    try:
        kind = _KINDS.get(stat.S_IFMT(path.lstat().st_mode), "something else")
    except OSError:
        kind = "gone by now"
    # The caches of model hubs are made of links.
    remedy = (
        "copy the bundle as plain files, cp -rL BUNDLE COPY, and use the copy"
        if kind == "a link"
        else "copy the bundle as plain files from its source or export it again"
    )
    return BundleError(f"{path}: not a {wanted} (it is {kind}); {remedy}")


def remedy_for(error: OSError) -> str:
    """What to do about a file that cannot be opened or read."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files (ulimit -n)"
    if error.errno in (errno.EACCES, errno.EPERM):
        return "check the permissions of the file and its folders"
    if error.errno == errno.ENOMEM:
        return "raise the limit of memory (ulimit -v)"
    if error.errno in (errno.EIO, errno.ENODEV, errno.ESTALE):
        return "check the storage device, then copy or export the bundle again"
    return "the bundle is incomplete: copy or export it again"


def open_plain(path: Path, what: str) -> int:
    """Descriptor of a regular file; `what` it is, for the message of a BundleError."""
    try:
        return disk.open_file(path)
    except OSError as error:
        raise unreadable(path, what, error) from error


def read_plain(path: Path, limit: int, what: str) -> bytes:
    """A small file, or its first `limit` + 1 bytes if it is larger. Raises BundleError."""
    try:
        return disk.read_file(path, limit)
    except OSError as error:
        raise unreadable(path, what, error) from error


def unreadable(path: Path, what: str, error: OSError) -> BundleError:
    """The error for a file that the system does not let us read, or that is none."""
    if isinstance(error, disk.NotRegularError):
        return not_plain(path)
    return BundleError(f"{path}: cannot read this {what} ({error.strerror}); {remedy_for(error)}")


def read_at(descriptor: int, nbytes: int, offset: int) -> bytearray:
    """Bytes from there on, fewer only at the end of the file. Raises OSError."""
    buffer = bytearray(nbytes)
    with memoryview(buffer) as view:
        count = disk.fill(descriptor, view, offset)
    del buffer[count:]
    return buffer


def read_piece(path: Path, descriptor: int, nbytes: int, offset: int) -> bytearray:
    """Just so many bytes of this file from there on. Raises BundleError."""
    try:
        data = read_at(descriptor, nbytes, offset)
    except OSError as error:
        raise BundleError(
            f"{path}: cannot read {nbytes} bytes at byte {offset} ({error.strerror}); "
            f"{remedy_for(error)}"
        ) from error
    if len(data) != nbytes:
        raise damaged(
            path,
            f"{len(data)} of {nbytes} bytes at byte {offset}; the file was cut while it was read",
        )
    return data


def check_folder(path: Path) -> None:
    """Raises BundleError unless there is a folder, and no link to one."""
    try:
        status = path.lstat()
    except OSError as error:
        raise unreadable(path, "folder", error) from error
    if not stat.S_ISDIR(status.st_mode):
        raise not_plain(path, "folder")


def check_file(path: Path, nbytes: int) -> None:
    """Raises BundleError unless a regular file of this size is there."""
    try:
        status = path.lstat()
    except OSError as error:
        raise BundleError(
            f"{path}: missing or unreadable ({error.strerror}), expected {nbytes} bytes; "
            f"{remedy_for(error)}"
        ) from error
    check_status(path, status, nbytes)


def check_status(path: Path, status: os.stat_result, nbytes: int) -> None:
    """Raises BundleError unless this status of the path is that of a file of so many bytes."""
    if not stat.S_ISREG(status.st_mode):
        raise not_plain(path)
    if status.st_size != nbytes:
        raise damaged(path, f"{status.st_size} bytes found, {nbytes} expected")


class PlainFolders:
    """The folders below a root, each looked at once."""

    def __init__(self, root: Path) -> None:
        self._root, self._seen = root, {root}

    def check(self, path: Path) -> None:
        """Raises BundleError unless every folder between the root and this file is one."""
        folder = self._root
        for part in path.relative_to(self._root).parts[:-1]:
            folder /= part
            if folder not in self._seen:
                check_folder(folder)
                self._seen.add(folder)
