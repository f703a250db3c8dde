"""The one seam to the file system, for every file whose loss or damage would matter.

What the exporter writes and what the runtime reads of a bundle goes through these few functions,
called as `disk.write(...)`, so that tests can put another disk in their place: one whose k-th call
fails, that reads short, or that forgets what was not synced when the power goes. All of them raise
OSError, as the system's own calls do; who calls says which file, and what to do. A signal interrupts
none of them: Python calls the system again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

_BINARY = getattr(os, "O_BINARY", 0)  # Windows translates line ends unless told otherwise
# A pipe or a device in the place of a file must not make us wait, and a link must not lead us away.
_CAREFUL = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
_READ = os.O_RDONLY | _BINARY | _CAREFUL
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY
_APPEND = os.O_WRONLY | os.O_APPEND | _BINARY
_EXCHANGE, _AT_CWD = 2, -100  # of Linux: RENAME_EXCHANGE, AT_FDCWD
_seek_lock = threading.Lock()


class NotRegularError(OSError):
    """There is something else than a file: a link, folder, pipe, socket or device."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "not a regular file", str(path))


def open_file(path: Path) -> int:
    """Descriptor of a regular file, for reading; a link is not followed. Never waits."""
    try:
        descriptor = os.open(path, _READ)
    except OSError as error:
        # Linux says ELOOP, others EMLINK or EFTYPE of a link; ENXIO is a socket or a pipe.
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO) or path.is_symlink():
            raise NotRegularError(path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularError(path)
    return descriptor


def size(descriptor: int) -> int:
    """Bytes of an open file."""
    return os.fstat(descriptor).st_size


def pread(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill the buffer from there on; returns the bytes read, which may be fewer."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], offset)
    with _seek_lock:  # Windows has no positional read; threads share the file's position
        os.lseek(descriptor, offset, os.SEEK_SET)
        data = os.read(descriptor, len(buffer))
    buffer[: len(data)] = data
    return len(data)


def create(path: Path) -> int:
    """Descriptor of a new file, for writing."""
    return os.open(path, _CREATE, 0o666)


def append(path: Path) -> int:
    """Descriptor of a file that exists, for writing at its end."""
    return os.open(path, _APPEND)


def write(descriptor: int, data: memoryview) -> int:
    """Write some of the data; returns how many bytes, which may be fewer."""
    return os.write(descriptor, data)


def fsync(descriptor: int) -> None:
    """Return once the file's bytes are on the medium.

    After a failure they may be lost though they can still be read, and a second call may succeed
    without writing them: whoever gets an error writes the file again, from what it was made of.
    """
    _sync(descriptor)


def close(descriptor: int) -> None:
    """Give a descriptor back."""
    os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make one folder; its parent exists."""
    path.mkdir()


def rename(source: Path, target: Path) -> None:
    """Give a file or folder another name; a file there is replaced, a folder is not."""
    source.replace(target)


def exchange(first: Path, second: Path) -> bool:
    """Let two files or folders change names, at once; False where the system cannot."""
    call = _renameat2()
    if call is None:
        return False
    if call(_AT_CWD, os.fsencode(first), _AT_CWD, os.fsencode(second), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):  # this file system cannot
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


def link(source: Path, target: Path) -> None:
    """Give a file a second name."""
    os.link(source, target)


def remove(path: Path) -> None:
    """Delete a file."""
    path.unlink()


def remove_folder(path: Path) -> None:
    """Delete an empty folder."""
    path.rmdir()


def sync_folder(path: Path) -> None:
    """Make names in a folder durable; Windows cannot open folders and needs no such call."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _sync(descriptor)
    except OSError as error:
        # Some network and user-space file systems have no such call for folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            error.filename = str(path)
            raise
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)
    if sys.platform == "darwin":  # whose fsync leaves the bytes in the drive's own memory
        import fcntl

        with contextlib.suppress(OSError):  # not every file system has it
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)


@cache
def _renameat2() -> Callable[..., int] | None:
    """Linux' call, if there is one."""
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError, AttributeError):
        call = ctypes.CDLL(None, use_errno=True).renameat2
        place = (ctypes.c_int, ctypes.c_char_p)
        call.argtypes = [*place, *place, ctypes.c_uint]
        return call
    return None


# Made of those above.


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Descriptor of a regular file, for reading, until the block ends."""
    descriptor = open_file(path)
    try:
        yield descriptor
    finally:
        close(descriptor)


def fill(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Fill all of the buffer from there on; returns the bytes read, fewer only at the file's end."""
    done = 0
    while done < len(buffer) and (count := pread(descriptor, buffer[done:], offset + done)):
        done += count
    return done


def read_file(path: Path, limit: int) -> bytes:
    """A small file, or its first `limit` + 1 bytes if it is larger."""
    with opened(path) as descriptor:
        buffer = memoryview(bytearray(min(size(descriptor), limit + 1)))
        return bytes(buffer[: fill(descriptor, buffer, 0)])


def write_all(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of the data."""
    view = memoryview(data)
    rest = view.cast("B") if view.nbytes else memoryview(b"")
    while rest:
        count = write(descriptor, rest)
        if not count:  # which would go on for ever
            raise OSError(errno.EIO, "the device takes no more bytes and gives no reason")
        rest = rest[count:]


def remove_tree(path: Path) -> None:
    """Delete a folder with all that is in it; a link in it goes, and not what it leads to."""
    for child in sorted(path.iterdir()):
        if child.is_dir() and not child.is_symlink():
            remove_tree(child)
        else:
            remove(child)
    remove_folder(path)


def make_folders(path: Path) -> None:
    """Make a folder and those that it is in, where they are missing."""
    if not path.is_dir():
        make_folders(path.parent)
        with contextlib.suppress(FileExistsError):
            make_folder(path)
