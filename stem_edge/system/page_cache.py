"""Removes files from the system's page cache, so that the next read comes from the device."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from stem_edge.errors import InputError


def files_in(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def drop_pages(paths: Iterable[Path]) -> None:
    """Remove files from the page cache, except for pages that a process has mapped and touched.

    Raises InputError if the system has no call for this. Does nothing on a file system in memory.
    """
    if not hasattr(os, "posix_fadvise"):
        raise InputError(
            "cold is not possible here: this system does not let programs take files out of the "
            "page cache (Linux does); leave out --cold"
        )
    for path in paths:
        with path.open("rb") as file:
            # Sync first, because only pages that are on disk can go. Some mounts cannot sync.
            with suppress(OSError):
                os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
