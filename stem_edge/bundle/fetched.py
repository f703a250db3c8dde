"""Fetch files of a model on a hub, and check their sha256 before they are read.

Files are hashed once: a marker file in the user's cache folder records that the hashes were right.
Its name is a digest of the hashes, and of the sizes and mtimes of the files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from stem_edge.bundle.hub.fetch import Snapshot, fetch
from stem_edge.bundle.manifest import digest
from stem_edge.errors import BundleError, InputError
from stem_edge.files import disk
from stem_edge.files.disk import write_whole
from stem_edge.files.hashing import sha256_of
from stem_edge.files.names import cache_folder
from stem_edge.progress import Progress

CHECKED = "checked"  # folder of the marker files; each contains the path of its snapshot


def fetch_checked(snapshot: Snapshot, files: Mapping[str, str]) -> None:
    """Fetch the files that are not in the cache, and check the hashes of all files.

    files: name -> expected sha256. Raises HubError, and BundleError for a file with another hash.
    """
    fetch(snapshot, list(files))
    folder = snapshot.folder.resolve()
    mark = _mark(folder, files)
    if mark is not None and mark.exists():
        return
    sizes = {file: disk.status(folder / file).st_size for file in files}
    with Progress(sum(sizes.values()), "checking", snapshot.progress) as bar:
        for file, expected in files.items():
            if (found := sha256_of(folder / file, sizes[file], bar.advance)) != expected:
                raise BundleError(
                    f"{snapshot.name}: {file}: sha256 is {found}, expected {expected}; delete "
                    f"{disk.plain(folder / file)} and try again, and if that does not help, ask "
                    f"whoever pushed {snapshot.name.repository} to push it again"
                )
    if mark is not None:
        with contextlib.suppress(OSError):
            mark.parent.mkdir(parents=True, exist_ok=True)
            write_whole(mark, os.fsencode(folder))


def _mark(folder: Path, files: Mapping[str, str]) -> Path | None:
    """Return the path of the file that marks these files as checked; None if one is missing."""
    with contextlib.suppress(InputError, OSError):  # a user without a home; a file that is missing
        states = [disk.status(folder / file) for file in files]
        stamps = [(state.st_size, state.st_mtime_ns, state.st_ino) for state in states]
        return cache_folder(None) / CHECKED / digest(str(folder), files, stamps)
    return None


def marked_folder(mark: Path) -> str:
    """Return the folder of checked files that a marker file names; "" if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return os.fsdecode(disk.read_file(mark, 1 << 16))
    return ""
