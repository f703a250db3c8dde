"""Checksums of a bundle's files, compared with those in its manifest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from stem_edge.bundle.manifest import MANIFEST, TABLES, FileEntry, is_shard, open_manifest
from stem_edge.errors import BundleError
from stem_edge.files import disk
from stem_edge.files.plain_files import (
    PlainFolders,
    check_file,
    check_status,
    open_plain,
    read_piece,
    unreadable,
)

HASH_PIECE_NBYTES = 1 << 22


def tables_hash(files: Mapping[str, FileEntry]) -> str:
    """sha256 of a table store: over the lines `sha256  path` of its files, sorted by path."""
    digest = hashlib.sha256()
    for name in sorted(files):
        if name.startswith(TABLES + "/"):
            digest.update(f"{files[name].sha256}  {name}\n".encode())
    return digest.hexdigest()


def verify(
    path: str | Path,
    progress: Callable[[int], object] = lambda nbytes: None,
    *,
    shards: bool = True,
) -> dict[str, str]:
    """Hash every file of a bundle and return file -> "ok" or what is wrong.

    shards: False leaves out those of the tables, which then must be elsewhere.
    `progress` is called with the number of bytes just hashed. Raises BundleError when the bundle
    cannot be opened at all.
    """
    root = Path(path)
    manifest = open_manifest(root)
    folders = PlainFolders(root)
    results = {
        name: _verify_file(folders, root / name, entry, progress)
        for name, entry in sorted(manifest.files.items())
        if shards or not is_shard(name)
    }
    known = {MANIFEST, *manifest.files}
    return results | dict.fromkeys(sorted(_names(root) - known), "not part of the bundle")


def _names(root: Path) -> set[str]:
    """Names of all files and links below a folder; links are not followed."""

    def fail(error: OSError) -> None:
        raise unreadable(Path(error.filename), "folder", error) from error

    found = set()
    for folder, folders, files in os.walk(root, onerror=fail):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        found |= {Path(folder, name).relative_to(root).as_posix() for name in files + links}
    return found


def _verify_file(
    folders: PlainFolders, path: Path, entry: FileEntry, progress: Callable[[int], object]
) -> str:
    try:
        folders.check(path)
        found = sha256_of(path, entry.nbytes, progress)
    except BundleError as error:
        return str(error).removeprefix(f"{path}: ")
    return "ok" if found == entry.sha256 else f"sha256 is {found}, expected {entry.sha256}"


def sha256_of(path: Path, nbytes: int, progress: Callable[[int], object]) -> str:
    """Hash a plain file of this size. Raises BundleError if it differs or cannot be read."""
    check_file(path, nbytes)
    descriptor = open_plain(path, "file")
    try:
        # Checked again once open, because another file may be at the path by now.
        check_status(path, os.fstat(descriptor), nbytes)
        digest = hashlib.sha256()
        for at in range(0, nbytes, HASH_PIECE_NBYTES):
            piece = read_piece(path, descriptor, min(HASH_PIECE_NBYTES, nbytes - at), at)
            digest.update(piece)
            progress(len(piece))
        return digest.hexdigest()
    finally:
        disk.close(descriptor)
