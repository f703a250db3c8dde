"""Folders with all that is above or in them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from stem_edge.files import disk


def remove_tree(path: Path) -> None:
    """Delete a folder and all that is in it; links are deleted, not followed."""
    for child in sorted(path.iterdir()):
        if child.is_dir() and not child.is_symlink():
            remove_tree(child)
        else:
            disk.remove(child)
    disk.remove_folder(path)


def make_folders(path: Path) -> None:
    """Make a folder and its missing parents."""
    if not path.is_dir():
        make_folders(path.parent)
        with contextlib.suppress(FileExistsError):
            disk.make_folder(path)
