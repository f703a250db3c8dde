"""Opening of edit files, and checks that they fit a bundle."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from stem_edge.bundle.edit_files.file import SUFFIX, Edit, check_edit, read_edit
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import EditError, InputError


def find_edit(name: str | Path) -> Path:
    """Return the path of an edit file; the suffix .edit may be left out. Raises EditError."""
    given = Path(name)
    whole = given if given.suffix == SUFFIX or not given.name else Path(f"{given}{SUFFIX}")
    for path in (whole, given):
        if _is_file(path):
            return path
    raise EditError(
        f"{name or repr(name)}: no such edit file; make one with: stem-edge edit BUNDLE --source TEXT "
        "--target TEXT -o FILE"
    )


def open_edit(bundle: Bundle, name: str | Path) -> Edit:
    """Read an edit, and check that it fits this bundle. Raises EditError."""
    path = find_edit(name)
    edit = read_edit(path)
    try:
        check_edit(edit, bundle)
    except EditError as error:
        raise EditError(f"{path}: {error}") from error
    return edit


def open_edits(bundle: Bundle, names: Iterable[str]) -> list[Edit]:
    """Read several edits, in their order. Raises EditError."""
    return [open_edit(bundle, name) for name in names]


def as_edit(bundle: Bundle, given: Edit | str | Path) -> Edit:
    """Return an edit, read from a file if `given` is a path, checked to fit this bundle.

    Raises EditError, and InputError if `given` is of another type.
    """
    if isinstance(given, str | Path):
        return open_edit(bundle, given)
    if not isinstance(given, Edit):
        raise InputError(
            f"an edit is given as {type(given).__name__}; expected an Edit or the path of an edit "
            "file, and several edits as separate arguments"
        )
    check_edit(given, bundle)
    return given


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long or with a NUL, or in a folder that cannot be searched
        return False
