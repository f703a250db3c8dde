"""Where edit files are looked for: by their path, or by name beside the bundle and here."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from stem_edge.bundle.manifest import Bundle
from stem_edge.edits.file import SUFFIX, Edit, check_edit, read_edit
from stem_edge.errors import EditError, InputError


def beside(bundle: str | Path) -> Path:
    """The folder around a bundle's, where its edits are kept: nothing is written into a bundle."""
    path = Path(bundle)
    return path.parent if path.name not in ("", "..") else path.resolve().parent


def search_folders(bundle: str | Path) -> list[Path]:
    """Folders in which a name alone is looked for: beside the bundle, and the current folder."""
    first, here = beside(bundle), Path()
    return [first] if first.resolve() == here.resolve() else [first, here]


def find_edit(bundle: str | Path, name: str) -> Path:
    """The edit file of a name or path, which may lack the suffix .edit.

    A path with a folder in it is that of the file. A name alone is looked for in search_folders.
    Raises EditError if there is no such file, or another one in each of the folders.
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
            one, other = (path.absolute() for path in found)
            raise EditError(f"{name}: both {one} and {other} are there; give the path of one")
        if found:
            return found[0]
    where = "" if is_path else f" in {' or '.join(str(each.resolve()) for each in folders)}"
    raise EditError(
        f"{name or repr(name)}: no such edit file{where}; see which there are with: stem-edge edit BUNDLE --list"
    )


def open_edit(bundle: Bundle, name: str) -> tuple[Path, Edit]:
    """The edit of a name or path, checked to be one for this bundle. Raises EditError."""
    path = find_edit(bundle.path, name)
    edit = read_edit(path)
    try:
        check_edit(edit, bundle)
    except EditError as error:
        raise EditError(f"{path}: {error}") from error
    return path, edit


def open_edits(bundle: Bundle, names: Iterable[str]) -> list[Edit]:
    """The edits of several names or paths, in their order. Raises EditError."""
    return [open_edit(bundle, name)[1] for name in names]


def as_edit(bundle: Bundle, given: Edit | str | Path) -> Edit:
    """An edit as it is, or that of a name or path; checked to be one for this bundle.

    Raises EditError, InputError for anything else.
    """
    if isinstance(given, str | Path):
        return open_edit(bundle, str(given))[1]
    if not isinstance(given, Edit):
        raise InputError(
            f"an edit is given as {type(given).__name__}; expected an Edit, or the name or path "
            "of a file, and several as arguments of their own"
        )
    check_edit(given, bundle)
    return given


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, a folder that must not be searched
        return False
