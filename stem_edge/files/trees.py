"""Making and deleting folders with everything above or in them."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from stem_edge.files import disk
from stem_edge.files.lock import lock


def remove_tree(path: Path, parent: Path, locked_by: str = "") -> bool:
    """Delete a folder that lies directly in `parent`, with everything in it; False while it is in use.

    Every recursive deletion goes through here. Links in the folder are deleted, not followed.
    locked_by: name of the file in it that its users lock; "" for a folder without users.
    Raises OSError, also for a link and for a path that leads out of `parent`.
    """
    if path.parent != parent or not _is_direct(path, parent) or not path.is_dir():
        raise OSError(errno.EINVAL, "not a folder of stem-edge; delete it yourself", str(path))
    if not locked_by:
        _empty(path)
        disk.remove_folder(path)
        return True
    descriptor = disk.update(path / locked_by)
    try:
        if not lock(descriptor):
            return False
        _empty(path, locked_by)
        if disk.RENAMES_OPEN:
            _remove_last(path, locked_by)
    finally:
        disk.close(descriptor)
    if not disk.RENAMES_OPEN:  # a file that is open cannot be deleted there
        _remove_last(path, locked_by)
    return True


def _is_direct(path: Path, parent: Path) -> bool:
    """Return whether a path is a direct child of `parent`: neither a link nor `..`."""
    return os.path.normcase(path.resolve()) == os.path.normcase(parent.resolve() / path.name)


def _empty(path: Path, spared: str = "") -> None:
    for child in sorted(path.iterdir()):
        if child.is_dir() and _is_direct(child, path):
            _empty(child)
            disk.remove_folder(child)
        elif child.name != spared:
            disk.remove(child)


def _remove_last(path: Path, locked_by: str) -> None:
    with contextlib.suppress(OSError):  # another process is filling the folder again
        disk.remove(path / locked_by)
        disk.remove_folder(path)


def make_folders(path: Path) -> None:
    """Make a folder and its missing parents."""
    if not path.is_dir():
        make_folders(path.parent)
        with contextlib.suppress(FileExistsError):
            disk.make_folder(path)
