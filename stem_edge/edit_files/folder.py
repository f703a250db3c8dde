"""Lookup of edit files: by path, or by name beside the bundle and in the current folder."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from stem_edge.bundle.opening import Bundle
from stem_edge.edit_files.file import SUFFIX, Edit, check_edit, read_edit
from stem_edge.errors import EditError, InputError
from stem_edge.hub.names import name_of


def edits_folder(bundle: str | Path) -> Path:
    """Return the folder that contains a bundle: its edits are kept there, never inside it.

    For a bundle in the hub's cache, which takes no other files, it is the current folder.
    """
    path = Path(bundle)
    if name_of(path.resolve()) is not None:
        return Path()
    return path.parent if path.name not in ("", "..") else path.resolve().parent


def search_folders(bundle: str | Path) -> list[Path]:
    """Return the folders to search for a bare name: the one around the bundle, the current one."""
    first, here = edits_folder(bundle), Path()
    return [first] if first.resolve() == here.resolve() else [first, here]


def find_edit(bundle: str | Path, name: str) -> Path:
    """Find an edit file by name or path; the suffix .edit may be left out.

    What contains a folder is a path; a bare name is searched for in search_folders. Raises
    EditError if there is no such file, or if both folders have a different one.
    """
    given = Path(name)
    is_path = any(separator in name for separator in (os.sep, os.altsep) if separator)
    folders = [Path()] if is_path else search_folders(bundle)
    spelled = [given]
    if given.name and given.suffix != SUFFIX:
        spelled.insert(0, given.with_name(given.name + SUFFIX))
    for each in spelled:
        found = [folder / each for folder in folders if _is_file(folder / each)]
        if len(found) > 1 and not found[0].samefile(found[1]):
            first, second = (path.absolute() for path in found)
            raise EditError(f"{name}: both {first} and {second} exist; give the path of one")
        if found:
            return found[0]
    where = "" if is_path else f" in {' or '.join(str(each.resolve()) for each in folders)}"
    raise EditError(
        f"{name or repr(name)}: no such edit file{where}; list them with: stem-edge edit "
        "BUNDLE --list"
    )


def open_edit(bundle: Bundle, name: str) -> tuple[Path, Edit]:
    """Find and read an edit, and check that it fits this bundle. Raises EditError."""
    path = find_edit(bundle.path, name)
    edit = read_edit(path)
    try:
        check_edit(edit, bundle)
    except EditError as error:
        raise EditError(f"{path}: {error}") from error
    return path, edit


def open_edits(bundle: Bundle, names: Iterable[str]) -> list[Edit]:
    """Open several edits by name or path, in their order. Raises EditError."""
    return [open_edit(bundle, name)[1] for name in names]


def as_edit(bundle: Bundle, given: Edit | str | Path) -> Edit:
    """Return an edit, read from a file if given by name or path, checked to fit this bundle.

    Raises EditError, and InputError if `given` is of another type.
    """
    if isinstance(given, str | Path):
        return open_edit(bundle, str(given))[1]
    if not isinstance(given, Edit):
        raise InputError(
            f"an edit is given as {type(given).__name__}; expected an Edit, or the name or path "
            "of an edit file, and several edits as separate arguments"
        )
    check_edit(given, bundle)
    return given


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long or with a NUL, or in a folder that cannot be searched
        return False
