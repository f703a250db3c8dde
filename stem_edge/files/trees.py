"""Creates folders with their parents, and deletes folder trees without following links."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from stem_edge.files import disk


def remove_tree(path: Path, parent: Path) -> None:
    """Delete a folder that lies directly in `parent`, with everything in it.

    Every recursive deletion goes through here. Links in the folder are deleted, not followed.
    Raises OSError, for example if `path` is a link or leads out of `parent`.
    """
    if path.parent != parent or not _is_direct(path, parent) or not path.is_dir():
        raise OSError(errno.EINVAL, "not a folder of stem-edge; delete it yourself", str(path))
    _empty(path)
    disk.remove_folder(path)


def _is_direct(path: Path, parent: Path) -> bool:
    """Return True if a path lies directly in `parent`; False for a link or `..`."""
    return os.path.normcase(path.resolve()) == os.path.normcase(parent.resolve() / path.name)


def _empty(path: Path) -> None:
    for child in sorted(path.iterdir()):
        if child.is_dir() and _is_direct(child, path):
            _empty(child)
            disk.remove_folder(child)
        else:
            disk.remove(child)


def make_folders(path: Path) -> None:
    if not path.is_dir():
        make_folders(path.parent)
        with contextlib.suppress(FileExistsError):
            disk.make_folder(path)
