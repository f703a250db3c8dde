"""File locks between processes, so that only one process at a time does some work."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stem_edge.files import disk

PAUSE_SECONDS = 0.1
_FAR = 1 << 30  # beyond the end of the file


@contextlib.contextmanager
def alone(path: Path, waiting: Callable[[], object]) -> Iterator[None]:
    """Hold a file's lock during the `with` block; create the file if missing. Raises OSError.

    waiting: called once before waiting, if another process holds the lock.
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
    """Lock an open file until it is closed; return False if already locked. Raises OSError."""
    try:
        if sys.platform == "win32":
            import msvcrt

            # Other handles cannot read locked bytes, so lock a byte beyond the end of the file.
            os.lseek(descriptor, _FAR, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True
