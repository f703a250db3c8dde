"""File system calls for the files of bundles, in one place so that tests can fake a failing disk.

Callers write `disk.write(...)`, so that a test can replace a function by one that fails at call k,
reads fewer bytes, or loses unsynced data in a power cut. All functions raise OSError as the system
calls do; callers convert it to an error that names the file and a remedy.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

_BINARY = getattr(os, "O_BINARY", 0)  # without it, Windows translates line ends
# Opening a pipe or a device must not block, and a link must not lead to another file.
_CAREFUL = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)
_READ = os.O_RDONLY | _BINARY | _CAREFUL
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY
_APPEND = os.O_WRONLY | os.O_APPEND | _BINARY
_seek_lock = threading.Lock()


class NotRegularError(OSError):
    """The path is not a regular file, but a link, folder, pipe, socket or device."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "not a regular file", str(path))


def open_file(path: Path) -> int:
    """Open a regular file for reading. Follows only links of a hub's cache; never blocks."""
    try:
        descriptor = os.open(plain(path), _READ)
    except OSError as error:
        # A link gives ELOOP on Linux, EMLINK or EFTYPE elsewhere; a socket or pipe gives ENXIO.
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
            raise NotRegularError(path) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularError(path)
    return descriptor


def plain(path: Path) -> Path:
    """Follow a path that is a link of a hub's cache. Raises NotRegularError for other links."""
    if not path.is_symlink():
        return path
    from stem_edge.files.hub_links import blob_of  # needed only for links

    if (blob := blob_of(path)) is None:
        raise NotRegularError(path)
    return blob


def status(path: Path) -> os.stat_result:
    """Return `lstat` of a path, or of the file behind a link of a hub's cache."""
    try:
        return plain(path).lstat()
    except NotRegularError:
        return path.lstat()


def size(descriptor: int) -> int:
    return os.fstat(descriptor).st_size


def pread(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Read from `offset` on into the buffer. Return the number of bytes read: all, or fewer."""
    if hasattr(os, "preadv"):
        return os.preadv(descriptor, [buffer], offset)
    with _seek_lock:  # Windows cannot read at an offset, and threads share the file's position
        os.lseek(descriptor, offset, os.SEEK_SET)
        data = os.read(descriptor, len(buffer))
    buffer[: len(data)] = data
    return len(data)


def create(path: Path, mode: int = 0o666) -> int:
    """Create a file and open it for writing. mode: its permission bits, before the umask."""
    return os.open(path, _CREATE, mode)


def append(path: Path) -> int:
    return os.open(path, _APPEND)


def update(path: Path) -> int:
    """Open a file for reading and writing. Create it if missing, with access for this user only."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | _BINARY | _CAREFUL, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularError(path)
    return descriptor


def resize(descriptor: int, nbytes: int) -> None:
    """Set the size of a file. New bytes are zeros, and take no space on most file systems."""
    os.ftruncate(descriptor, nbytes)


def write(descriptor: int, data: memoryview) -> int:
    """Write the data. Return the number of bytes written: all, or fewer."""
    return os.write(descriptor, data)


def fsync(descriptor: int) -> None:
    """Write the file's data to the storage device, and return when it is there.

    After an error the data may be lost, although it can still be read, and a second call may succeed
    without writing it. The caller must then write the file again from its source.
    """
    _sync(descriptor)


def close(descriptor: int) -> None:
    os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make one folder; its parent must exist."""
    path.mkdir()


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder; a file at the target is replaced, a folder is not."""
    source.replace(target)


def remove(path: Path) -> None:
    path.unlink()


def remove_folder(path: Path) -> None:
    path.rmdir()


def sync_folder(path: Path) -> None:
    """Make the names in a folder survive a power cut. Does nothing on Windows."""
    if os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _sync(descriptor)
    except OSError as error:
        # Some network and user-space file systems cannot sync folders.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            error.filename = str(path)
            raise
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    os.fsync(descriptor)
    if sys.platform == "darwin":  # fsync leaves the bytes in the drive's cache, so ask for more
        import fcntl

        with contextlib.suppress(OSError):  # not every file system can
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)


# Built on the calls above, which tests replace.


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a regular file for reading, and close it at the end of the `with` block."""
    descriptor = open_file(path)
    try:
        yield descriptor
    finally:
        close(descriptor)


def fill(descriptor: int, buffer: memoryview, offset: int) -> int:
    """Read from `offset` on until the buffer is full or the file ends; return the byte count."""
    done = 0
    while done < len(buffer) and (count := pread(descriptor, buffer[done:], offset + done)):
        done += count
    return done


def read_file(path: Path, limit: int) -> bytes:
    """Read a small file, or the first `limit` + 1 bytes of a larger one."""
    with opened(path) as descriptor:
        buffer = memoryview(bytearray(min(size(descriptor), limit + 1)))
        return bytes(buffer[: fill(descriptor, buffer, 0)])


def write_all(descriptor: int, data: bytes | bytearray | memoryview) -> None:
    rest = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while rest:
        count = write(descriptor, rest)
        if not count:  # otherwise this would never end
            raise OSError(errno.EIO, "the device takes no more bytes and gives no reason")
        rest = rest[count:]


def write_whole(
    path: Path, data: bytes | Iterable[bytes], *, durable: bool = False, mode: int = 0o666
) -> None:
    """Write a file atomically: to a temporary file, which is then renamed. Raises OSError.

    data: the contents, or their parts in order. durable: True if the file must survive a power cut. mode: see `create`.
    """
    beside = path.parent / f".{os.urandom(8).hex()}.tmp"
    try:
        descriptor = create(beside, mode)
        try:
            for part in [data] if isinstance(data, bytes) else data:
                write_all(descriptor, part)
            if durable:
                fsync(descriptor)
        finally:
            close(descriptor)
        rename(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(beside)
        raise
    if durable:
        sync_folder(path.parent)
