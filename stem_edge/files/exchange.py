"""Swapping the names of two files in one step, which Linux alone can."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

_EXCHANGE, _AT_CWD = 2, -100  # RENAME_EXCHANGE, AT_FDCWD of Linux


def swap(first: Path, second: Path) -> bool:
    """Swap the names of two files or folders atomically; False where the system cannot."""
    call = renameat2()
    if call is None:
        return False
    if call(_AT_CWD, os.fsencode(first), _AT_CWD, os.fsencode(second), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):  # this file system cannot
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


@cache
def renameat2() -> Callable[..., int] | None:
    """Find Linux's renameat2; None on systems without it."""
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError, AttributeError):
        call = ctypes.CDLL(None, use_errno=True).renameat2
        place = (ctypes.c_int, ctypes.c_char_p)
        call.argtypes = [*place, *place, ctypes.c_uint]
        return call
    return None
