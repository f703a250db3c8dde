"""Names of files in a bundle, plain paths that mean the same file on every system; and the folder for caches.

A bundle may be carried to a system that ignores case in file names, cuts off trailing dots, or
reserves names for devices; so names that would mean something else there are refused here.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from stem_edge.errors import InputError

KEY_CHARS = 32  # of digests in file names
MAX_PART_NBYTES = 255  # most that file systems take
MAX_NAME_NBYTES = 1024
MAX_FILES = 1 << 13
RESERVED = set('\\:<>"|?*')
_DEVICES = {"con", "prn", "aux", "nul", "conin$", "conout$", "clock$"} | {
    f"{port}{digit}" for port in ("com", "lpt") for digit in "0123456789¹²³"
}


def check_names(names: Collection[str]) -> None:
    """Raise ValueError for a name that is not plain, and for two that could be one file."""
    if len(names) > MAX_FILES:
        raise ValueError(f"{len(names)} files; expected at most {MAX_FILES}")
    for name in names:
        _check_name(name)
    folders = {str(parent) for name in names for parent in PurePosixPath(name).parents} - {"."}
    if both := folders & set(names):
        raise ValueError(f"{min(both)!r} is the name of a file and of a folder")
    spelled: dict[str, str] = {}
    for path in sorted(folders.union(names)):
        if (other := spelled.setdefault(_folded(path), path)) != path:
            raise ValueError(f"file names {other!r} and {path!r} are the same file on some systems")


def _check_name(name: str) -> None:
    if len(name) > MAX_NAME_NBYTES or len(name.encode()) > MAX_NAME_NBYTES:
        raise ValueError(f"file name {name[:40]!r}... is longer than {MAX_NAME_NBYTES} bytes")
    path = PurePosixPath(name)
    plain = name.isprintable() and not set(name) & RESERVED and name == "/".join(path.parts)
    if not plain or not path.parts or path.is_absolute() or not all(map(is_plain, path.parts)):
        raise ValueError(f"file name {name!r} is not a plain path inside the bundle")


def is_plain(part: str) -> bool:
    """Return whether every system takes this name of a file or folder unchanged."""
    return (
        part != ".."
        and part == part.rstrip(". ")
        and len(part.encode()) <= MAX_PART_NBYTES
        and unicodedata.normalize("NFC", part) == part
        and part.split(".")[0].rstrip(" ").casefold() not in _DEVICES
    )


def _folded(name: str) -> str:
    """Fold a name so that names that some file system takes for one become equal."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def cache_folder(given: str | Path | None) -> Path:
    """Return the given folder, or the one for caches of this system. Raises InputError."""
    if given is not None:
        return Path(given)
    from platformdirs import user_cache_path

    try:
        return user_cache_path("stem-edge", appauthor=False)
    except RuntimeError as error:  # in a container, the user may have no name
        raise InputError(
            f"there is no folder for caches ({error}); set HOME, or give cache_dir (--cache-dir)"
        ) from error
