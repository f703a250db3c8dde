"""Compares the checksums of a bundle's files with the checksums in its manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from stem_edge.bundle.manifest import TABLES, FileEntry, is_shard, open_manifest
from stem_edge.bundle.opening import bundle_folder
from stem_edge.errors import BundleError
from stem_edge.files.hashing import sha256_of
from stem_edge.files.plain_files import check_folders


def tables_hash(files: Mapping[str, FileEntry]) -> str:
    """Return the sha256 of a bundle's table store, computed from its file names and sha256s."""
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
    """Hash every file that a bundle's manifest lists. Return file name -> "ok", or a description of what is wrong.

    Raises BundleError if the bundle cannot be opened.
    progress: called with the number of bytes just hashed.
    shards: False if the shards of the tables are not in the folder; then they are not hashed.
    """
    root = bundle_folder(path, shards=shards)
    manifest = open_manifest(root)
    folders = set[Path]()
    return {
        name: _verify_file(root, name, entry, folders, progress)
        for name, entry in sorted(manifest.files.items())
        if shards or not is_shard(name)
    }


def _verify_file(
    root: Path, name: str, entry: FileEntry, folders: set[Path], progress: Callable[[int], object]
) -> str:
    path = root / name
    try:
        check_folders(root, path, folders)
        found = sha256_of(path, entry.nbytes, progress)
    except BundleError as error:
        return str(error).removeprefix(f"{path}: ")
    return "ok" if found == entry.sha256 else f"sha256 is {found}, expected {entry.sha256}"
