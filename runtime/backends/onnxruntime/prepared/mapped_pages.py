"""Pages of mapped files: which of them stay in this process."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Collection
from pathlib import Path

from stem_edge.system.memory import PROC


def give_back_mapped(files: Collection[Path]) -> None:
    """Give back pages of mapped files, unless they were written to; those that are used come back."""
    if sys.platform != "linux":
        return
    advise, names, span, name = ctypes.CDLL(None).madvise, {str(file) for file in files}, "", ""
    with contextlib.suppress(OSError), (PROC / "self" / "smaps").open(errors="replace") as lines:
        for words in (line.rstrip("\n").split(maxsplit=5) for line in lines):
            if not words[0].endswith(":"):
                span, name = words[0], words[-1]
            elif words[:2] == ["Anonymous:", "0"] and name in names:
                start, stop = (int(address, 16) for address in span.split("-"))
                advise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), mmap.MADV_DONTNEED)
