"""Open files of this process, counted."""

from __future__ import annotations

import os
import sys

import pytest

DATA = bytes(range(1, 11))
posix = pytest.mark.skipif(os.name != "posix", reason="links and pipes are made as on POSIX")


def open_files() -> int:
    """Descriptors of this process; elsewhere than on Linux always none."""
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0  # noqa: PTH208
