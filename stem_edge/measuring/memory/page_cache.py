"""How much of a file the system holds in its page cache, whoever read it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from stem_edge.errors import InputError


def cached_nbytes(paths: Iterable[Path]) -> int | None:
    """Bytes of these files that are in memory; None where the system does not tell.

    By mincore(2), which says of a file that this user may not write to that all of it is.
    """
    mincore = getattr(ctypes.CDLL(None), "mincore", None) if os.name == "posix" else None
    total = 0
    for path in paths:
        if mincore is None or not _may_ask(path) or (cached := _cached(path, mincore)) is None:
            return None
        total += cached
    return total


def files_in(root: Path) -> list[Path]:
    """All files of a folder."""
    return sorted(path for path in root.rglob("*") if path.is_file())


def drop_pages(paths: Iterable[Path]) -> None:
    """Take files out of the page cache; what a process has mapped and touched stays.

    Raises InputError where the system takes nothing out when asked.
    """
    if not hasattr(os, "posix_fadvise"):
        raise InputError(
            "cold is not possible here: this system lets no program take files out of the page "
            "cache (Linux does); leave out --cold and --device"
        )
    for path in paths:
        with path.open("rb") as file:
            with suppress(OSError):  # only pages that are on disk can go; some mounts cannot sync
                os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _may_ask(path: Path) -> bool:
    return os.access(path, os.W_OK) or path.stat().st_uid == os.geteuid()


def _cached(path: Path, mincore: ctypes._NamedFuncPointer) -> int | None:
    if not path.stat().st_size:  # cannot be mapped
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        nbytes = len(mapped)
        pages = np.zeros(-(-nbytes // mmap.PAGESIZE), np.uint8)
        view = np.frombuffer(mapped, np.uint8)  # ctypes takes no read-only buffer
        address = view.ctypes.data
        del view
        status = mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_void_p(pages.ctypes.data)
        )
    if status:
        return None
    return min(int((pages & 1).sum()) * mmap.PAGESIZE, nbytes)
