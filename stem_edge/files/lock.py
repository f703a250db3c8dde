"""A lock on a file, so that one process alone does the work that it stands for."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stem_edge.files import disk

PAUSE_SECONDS = 0.1
_LOCKED = 33  # ERROR_LOCK_VIOLATION of Windows
_FAR = 1 << 30  # of 4 GiB each: a place behind the end of any file


@contextlib.contextmanager
def alone(path: Path, waiting: Callable[[], object]) -> Iterator[None]:
    """Hold the lock of a file, which is made if it is not there. Raises OSError.

    waiting: called if another process holds it, which is then waited for.
    """
    descriptor = disk.update(path)
    try:
        if not lock(descriptor):
            waiting()
            while not lock(descriptor):
                time.sleep(PAUSE_SECONDS)
        yield
    finally:
        disk.close(descriptor)


def lock(descriptor: int) -> bool:
    """Take a file for this process until it is closed; False if another process has it.

    Raises OSError also where the file system has no locks.
    """
    if sys.platform == "win32":
        import msvcrt
        from ctypes import wintypes

        # Of bytes that are locked, nothing can be read by another handle, so lock one that is not there.
        call = ctypes.WinDLL("kernel32", use_last_error=True).LockFile
        call.argtypes = [wintypes.HANDLE, *[wintypes.DWORD] * 4]
        if call(msvcrt.get_osfhandle(descriptor), 0, _FAR, 1, 0):
            return True
        if (number := ctypes.get_last_error()) == _LOCKED:
            return False
        raise ctypes.WinError(number)
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True
