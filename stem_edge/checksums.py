"""Every file of a bundle against its checksum in the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from stem_edge.bundle import MANIFEST, FileEntry, check_file, open_manifest
from stem_edge.errors import BundleError

HASH_PIECE_NBYTES = 1 << 22


def verify(
    path: str | Path, progress: Callable[[int], object] = lambda nbytes: None
) -> dict[str, str]:
    """Hash every file of a bundle. Returns file -> "ok" or what is wrong.

    `progress` is called with the number of bytes just hashed. Raises BundleError when the bundle
    cannot be opened at all.
    """
    root = Path(path)
    manifest = open_manifest(root)
    results = {
        name: _verify_file(root / name, entry, progress)
        for name, entry in sorted(manifest.files.items())
    }
    known = {MANIFEST, *manifest.files}
    found = {p.relative_to(root).as_posix() for p in root.rglob("*") if not p.is_dir()}
    return results | dict.fromkeys(sorted(found - known), "not part of the bundle")


def _verify_file(path: Path, entry: FileEntry, progress: Callable[[int], object]) -> str:
    digest = hashlib.sha256()
    try:
        check_file(path, entry.nbytes)
        with path.open("rb") as file:
            while piece := file.read(HASH_PIECE_NBYTES):
                digest.update(piece)
                progress(len(piece))
    except BundleError as error:
        return str(error).removeprefix(f"{path}: ")
    except OSError as error:
        return f"cannot read ({error.strerror})"
    found = digest.hexdigest()
    return "ok" if found == entry.sha256 else f"sha256 is {found}, expected {entry.sha256}"
