"""Files of a model on a hub: fetched, and hashed before anything reads them.

A hub may be wrong, a mirror of it dishonest, and a cache damaged. So each file is compared with the
sha256 that is expected of it, once for each change: a list in the user's cache folder says which
files were. Losing the list costs another look, no more. A wrong file is deleted and named.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from stem_edge.errors import BundleError, HubError, InputError
from stem_edge.files import disk
from stem_edge.files.hashing import sha256_of
from stem_edge.files.whole_file import write_whole
from stem_edge.hub.fetch import Snapshot, fetch, remove
from stem_edge.progress import Progress
from stem_edge.system.user_folder import KEY_CHARS, cache_folder

CHECKED = "checked"  # folder of the lists
MAX_LIST_NBYTES = 1 << 23  # for the most files that a bundle may have


class Expected(NamedTuple):
    """Size and hash that a file must have."""

    nbytes: int
    sha256: str


class Mark(NamedTuple):
    """State of a file when it had the right hash; another file may differ in it."""

    sha256: str
    nbytes: int
    mtime_ns: int
    inode: int


class CheckedFiles(msgspec.Struct, forbid_unknown_fields=True):
    """Files of a snapshot that had the right hashes."""

    folder: str
    files: dict[str, Mark]


def fetch_checked(snapshot: Snapshot, files: Mapping[str, Expected]) -> None:
    """Fetch files that are not in the cache, and check all of them. Raises HubError, BundleError."""
    if snapshot.lacking(files):
        _check_sizes(snapshot, files)
        fetch(snapshot, files)
    check(snapshot, files)


def _check_sizes(snapshot: Snapshot, files: Mapping[str, Expected]) -> None:
    """Raise HubError for a file that cannot be right, before its first byte."""
    listing = snapshot.listing
    for file, expected in files.items():
        if file in listing and listing[file].nbytes != expected.nbytes:
            raise HubError(
                f"{snapshot.name}: {file} has {listing[file].nbytes} bytes on the hub, "
                f"{expected.nbytes} expected; {_ask(snapshot)}"
            )


def check(snapshot: Snapshot, files: Mapping[str, Expected]) -> None:
    """Hash the files that were not hashed since they changed.

    Raises BundleError, which names the first wrong one; it is deleted from the cache.
    """
    folder = str(snapshot.folder.resolve())
    path = _list_file(folder)
    known = _known(path, folder)
    found = {file: _mark(snapshot.folder / file, files[file]) for file in files}
    new = [file for file, mark in found.items() if mark is None or known.get(file) != mark]
    if not new:
        return
    with Progress(sum(files[n].nbytes for n in new), "checking", snapshot.progress) as bar:
        try:
            for file in new:
                _check_file(snapshot, file, files[file], bar)
                if (mark := found[file]) is not None:
                    known[file] = mark
        finally:
            _keep(path, CheckedFiles(folder, known))


def _check_file(snapshot: Snapshot, file: str, expected: Expected, bar: Progress) -> None:
    try:
        found = sha256_of(snapshot.folder / file, expected.nbytes, bar.advance)
        wrong = "" if found == expected.sha256 else f"sha256 is {found}, expected {expected.sha256}"
    except BundleError as error:
        wrong = str(error).removeprefix(f"{snapshot.folder / file}: ").partition("; ")[0]
    if wrong:
        remove(snapshot, file, expected.sha256)
        raise BundleError(
            f"{snapshot.name}: {file}: {wrong}; it is deleted from the cache: fetch it again, and if "
            f"that does not help, {_ask(snapshot)}"
        )


def _ask(snapshot: Snapshot) -> str:
    return f"ask whoever pushed {snapshot.name.repository} to push it again"


def _mark(path: Path, expected: Expected) -> Mark | None:
    try:
        status = disk.status(path)
    except OSError:
        return None
    return Mark(expected.sha256, status.st_size, status.st_mtime_ns, status.st_ino)


def _list_file(folder: str) -> Path | None:
    digest = hashlib.sha256(os.fsencode(folder)).hexdigest()[:KEY_CHARS]
    with contextlib.suppress(InputError):  # a user without a home has nowhere to keep it
        return cache_folder(None) / CHECKED / f"{digest}.json"
    return None


def read_checked(path: Path) -> CheckedFiles | None:
    """Read one of the lists; None if it is missing or damaged."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        return msgspec.json.decode(disk.read_file(path, MAX_LIST_NBYTES), type=CheckedFiles)
    return None


def _known(path: Path | None, folder: str) -> dict[str, Mark]:
    found = None if path is None else read_checked(path)
    return found.files if found is not None and found.folder == folder else {}


def _keep(path: Path | None, checked: CheckedFiles) -> None:
    with contextlib.suppress(OSError):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, msgspec.json.encode(checked))
