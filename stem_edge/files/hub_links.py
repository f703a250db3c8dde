"""Links in a model hub's cache: the only links that are followed when a bundle is read.

    <repository>/snapshots/<commit>/<name> -> ../../blobs/<etag>   one more .. for each folder in <name>
    <repository>/blobs/<etag> -> ../../blobs/<2 digits>/<digest>   next to <repository>: files of all repositories

Our code reads these two forms itself, because the system would follow a link to any file.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

COMMIT = re.compile(r"[0-9a-f]{40}")
BLOBS, SNAPSHOTS = "blobs", "snapshots"
_TO_BLOB = re.compile(rf"((?:\.\./){{2,}}){BLOBS}/([0-9A-Za-z][0-9A-Za-z._-]*)")
_TO_SHARED = re.compile(rf"\.\./\.\./{BLOBS}/([0-9a-f]{{2}})/(\1[0-9a-f]{{62}})")


def blob_of(link: Path) -> Path | None:
    """Return the path of the file behind a link in a hub's cache; None for any other link.

    The caller must open that path without following links. Raises OSError.
    """
    found = _TO_BLOB.fullmatch(_target(link))
    folder = Path(os.path.realpath(link.parent))
    up = found[1].count("/") if found else 0
    if found is None or len(folder.parents) < up:
        return None
    repository = folder.parents[up - 1]
    snapshots, commit, *_ = folder.relative_to(repository).parts
    blobs = repository / BLOBS
    if snapshots != SNAPSHOTS or not COMMIT.fullmatch(commit) or not _is_folder(blobs):
        return None
    blob = blobs / found[2]
    return _shared(blob) if blob.is_symlink() else blob


def _shared(blob: Path) -> Path | None:
    """Return the file, shared by all repositories, that a link in `blobs/` leads to, or None."""
    found, store = _TO_SHARED.fullmatch(_target(blob)), blob.parents[2] / BLOBS
    if found is None or not _is_folder(store) or not _is_folder(store / found[1]):
        return None
    return store / found[1] / found[2]


def _target(link: Path) -> str:
    # Not Path.readlink, which leaves out parts of the text.
    return os.readlink(link).replace(os.sep, "/")  # noqa: PTH115


def _is_folder(path: Path) -> bool:
    """Return True if the path is a folder, and not a link to a folder."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False
