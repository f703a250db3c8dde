"""Files in the system's page cache: how much of them is there, and how to take them out."""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from stem_edge.errors import InputError

MOST_LEFT = 0.05  # share of the files that may stay in the page cache in a run called cold


def cached_nbytes(paths: Iterable[Path]) -> int | None:
    """Return how many bytes of these files are in memory; None if the system does not tell.

    It tells by mincore(2), but claims that all is in memory of files that this user neither owns nor
    may write to.
    """
    mincore = getattr(ctypes.CDLL(None), "mincore", None) if os.name == "posix" else None
    total = 0
    for path in paths:
        if mincore is None or not _may_ask(path) or (cached := _cached(path, mincore)) is None:
            return None
        total += cached
    return total


def files_in(root: Path) -> list[Path]:
    """Return all files in a folder and the folders in it, sorted."""
    return sorted(path for path in root.rglob("*") if path.is_file())


def drop_pages(paths: Iterable[Path]) -> None:
    """Take files out of the page cache, except for pages that a process has mapped and touched.

    Raises InputError if the system has no call for that.
    """
    if not hasattr(os, "posix_fadvise"):
        raise InputError(
            "cold is not possible here: this system does not let programs take files out of the "
            "page cache (Linux does); leave out --cold and --device"
        )
    for path in paths:
        with path.open("rb") as file:
            # Sync first, because only pages that are on disk can go. Some mounts cannot sync.
            with suppress(OSError):
                os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def make_cold(files: list[Path]) -> None:
    """Take files out of the page cache, and warn if many pages stay. Raises as drop_pages does."""
    drop_pages(files)
    left, whole = cached_nbytes(files), sum(file.stat().st_size for file in files)
    if left is not None and left > MOST_LEFT * whole:
        warnings.warn(
            f"{left / whole:.0%} of {files[0].parent} stays in the page cache, so this run is not "
            "cold: another process uses it, or its file system lies in memory",
            RuntimeWarning,
            stacklevel=2,
        )


def _may_ask(path: Path) -> bool:
    return os.access(path, os.W_OK) or path.stat().st_uid == os.geteuid()


def _cached(path: Path, mincore: ctypes._NamedFuncPointer) -> int | None:
    if not path.stat().st_size:  # an empty file cannot be mapped
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        nbytes = len(mapped)
        pages = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapped, np.uint8)  # numpy, because ctypes takes no read-only buffer
        address = view.ctypes.data
        del view  # the mapping cannot be closed while an array refers to it
        status = mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_void_p(pages.ctypes.data)
        )
    if status:
        return None
    return min(int((pages & 1).sum()) * mmap.PAGESIZE, nbytes)
