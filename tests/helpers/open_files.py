"""The bytes of a small test file, and a count of open files."""

from __future__ import annotations

import os
import sys

import pytest

DATA = bytes(range(1, 11))
posix = pytest.mark.skipif(os.name != "posix", reason="needs POSIX links and pipes")


def open_files() -> int:
    """Number of open descriptors of this process; 0 where it is not Linux.

    Later it may be less: what earlier tests left to the garbage collector is closed at any time.
    """
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0  # noqa: PTH208
