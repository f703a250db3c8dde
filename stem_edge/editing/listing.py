"""Edit files of a bundle: list them, remove them, and choose the path of a new one."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from stem_edge.bundle.opening import Bundle
from stem_edge.edit_files.file import SUFFIX, Edit, NewRows, check_edit, read_edit, tables_id
from stem_edge.edit_files.folder import edits_folder, open_edit, search_folders
from stem_edge.errors import EditError, InputError

# Bytes of a text in a file name, so that two of them fit in the usual limit of 255.
LONGEST_PART = 100


class ListedEdit(NamedTuple):
    """Edit file of the bundle, read and checked."""

    path: Path
    nbytes: int
    edit: Edit


@dataclass(frozen=True)
class Listing:
    """Edit files in search_folders."""

    folders: tuple[Path, ...]
    edits: tuple[ListedEdit, ...]  # made for this bundle, sorted by folder and name
    of_other_bundles: int
    damaged: tuple[tuple[Path, str], ...]  # with the reason


def list_edits(bundle: Bundle) -> Listing:
    """List the edit files in search_folders. Raises InputError if a folder cannot be read."""
    folders, made_for = search_folders(bundle.path), tables_id(bundle)
    edits, damaged, others = [], [], 0
    for path in (path for folder in folders for path in _files(folder)):
        try:
            edit = read_edit(path)
            if edit.made_for != made_for:
                others += 1
                continue
            check_edit(edit, bundle)
            edits.append(ListedEdit(path, path.stat().st_size, edit))
        except (EditError, OSError) as error:
            damaged.append((path, str(error).removeprefix(f"{path}: ")))
    return Listing(tuple(folders), tuple(edits), others, tuple(damaged))


def remove_edits(bundle: Bundle, names: Iterable[str]) -> list[Path]:
    """Delete edit files, given by name or path, and return their paths.

    Raises EditError, and deletes none, if one is missing, damaged or made for another bundle;
    InputError if one cannot be deleted.
    """
    paths = list(dict.fromkeys(open_edit(bundle, name)[0] for name in names))
    for path in paths:
        try:
            path.unlink(missing_ok=True)  # two names may mean the same file, so it can be gone
        except OSError as error:
            raise InputError(f"{path}: cannot remove ({error.strerror})") from error
    return paths


def place_for(bundle: Bundle, edit: Edit, out: str | Path | None, *, force: bool) -> Path:
    """Return the path to write an edit to: `out`, or its default name beside the bundle.

    Raises InputError for a path inside the bundle or without the suffix .edit, and for a file that
    exists unless `force` is given.
    """
    path = edits_folder(bundle.path) / default_name(edit) if out is None else Path(out)
    if path.suffix != SUFFIX:
        raise InputError(f"{path}: the name of an edit file ends in {SUFFIX}; add it")
    if path.parent.resolve().is_relative_to(bundle.path.resolve()):
        raise InputError(
            f"{path}: inside the bundle, which is never changed; choose a path outside of it"
        )
    if path.is_dir():
        raise InputError(f"{path}: is a folder; choose another name")
    if not force and (path.exists() or path.is_symlink()):
        raise InputError(f"{path}: exists; choose another name with -o, or add --force")
    return path


def default_name(edit: Edit) -> str:
    """Return `SOURCE-TARGET.edit`, keeping letters, marks and digits of the texts."""
    change = edit.change
    if isinstance(change, NewRows):
        return f"rows{SUFFIX}"
    return f"{_plain(change.source)}-{_plain(change.target)}{SUFFIX}"


def _plain(text: str) -> str:
    kept = (c if unicodedata.category(c)[0] in "LMN" else "_" for c in text)
    return "".join(kept).encode()[:LONGEST_PART].decode(errors="ignore")


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.suffix == SUFFIX and p.is_file())
    except OSError as error:
        raise InputError(f"{folder}: cannot list this folder ({error.strerror})") from error
