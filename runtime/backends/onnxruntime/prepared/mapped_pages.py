"""Drops pages of memory-mapped files (Linux only), and locates packed matrices in weight files."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stem_edge.system.memory import PROC

PAGEMAP = PROC / "self" / "pagemap"
ENTRY_NBYTES = 8  # of a page in PAGEMAP
OF_FILE = np.uint64(61)  # bit of an entry; the next two bits are for swap and memory
PLACE = re.compile(rb"\|(\d+);(\d+);\d+")  # of a packed piece, in a graph: offset; bytes; checksum


class MappedPart(NamedTuple):
    """Part of a file at the addresses `start` to `stop`; it begins at byte `offset` of the file."""

    file: str
    start: int
    stop: int
    offset: int


def mappings() -> Iterator[MappedPart]:
    for line in (PROC / "self" / "maps").read_text(errors="replace").splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6:
            start, stop = (int(address, 16) for address in words[0].split("-"))
            yield MappedPart(words[5], start, stop, int(words[2], 16))


def is_written(pagemap: int, start: int, stop: int) -> bool:
    """Return True if a page between two addresses was written to, so that dropping this page would lose data.

    pagemap: file descriptor of /proc/self/pagemap. Raises OSError.
    """
    first, count = start // mmap.PAGESIZE, -(-(stop - start) // mmap.PAGESIZE)
    data = os.pread(pagemap, ENTRY_NBYTES * count, ENTRY_NBYTES * first)
    kinds = np.frombuffer(data, np.uint64) >> OF_FILE
    # Odd: a page of the file. 0: not in memory. 2 and 4: the page is only in memory or swap.
    return bool(((kinds > 0) & (kinds % 2 == 0)).any())


def give_back_mapped(files: Mapping[Path, int]) -> None:
    """Drop mapped pages of files from memory, unless they were written to.

    A page is read again when it is used again. files: path -> offset in the file before which pages are dropped.
    """
    if sys.platform != "linux":
        return
    advise, ends = ctypes.CDLL(None).madvise, {str(file): end for file, end in files.items()}
    with contextlib.suppress(OSError), PAGEMAP.open("rb", buffering=0) as pagemap:
        for one in mappings():
            stop = min(one.stop, one.start + ends.get(one.file, 0) - one.offset)
            if one.start < stop and not is_written(pagemap.fileno(), one.start, stop):
                nbytes = ctypes.c_size_t(stop - one.start)
                advise(ctypes.c_void_p(one.start), nbytes, mmap.MADV_DONTNEED)


def packed_places(graph: Path) -> list[tuple[int, int]]:
    """Return (offset, bytes) of each packed matrix or part of a matrix, in order of use by `graph`. Raises OSError."""
    return [(int(one[1]), int(one[2])) for one in PLACE.finditer(graph.read_bytes())]
