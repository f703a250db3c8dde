"""A bundle on a model hub: its files are fetched into the hub's cache as needed."""

from __future__ import annotations

from pathlib import Path

from stem_edge.bundle.fetched import Expected, fetch_checked
from stem_edge.bundle.manifest import MANIFEST, TABLES, is_shard, open_manifest
from stem_edge.errors import BundleError, InputError
from stem_edge.hub.fetch import fetch, keep_ref, open_snapshot, remove
from stem_edge.hub.names import HubName, name_of, parsed_name


class NoBundleError(BundleError):
    """A model on a hub is no bundle."""

    def __init__(self, found: HubName, asked: HubName) -> None:
        super().__init__(
            f"{asked}: not a bundle, it has no {MANIFEST}; make one with: stem-edge export {asked} OUT"
        )
        self.found = found  # with its commit


def fetched_folder(path: str, *, tables_later: bool, progress: bool | None) -> Path:
    """Fetch what a bundle's folder in the hub's cache lacks; return the folder.

    tables_later: leave its shards on the hub. Raises BundleError, HubError, InputError.
    """
    name = parsed_name(path)
    snapshot = open_snapshot(name, progress)
    if snapshot.lacking([MANIFEST]):
        if MANIFEST not in snapshot.listing:
            raise NoBundleError(snapshot.name, name)
        fetch(snapshot, [MANIFEST])
    try:
        manifest = open_manifest(snapshot.folder)
    except BundleError:
        remove(snapshot, MANIFEST)  # otherwise a damaged one would stay for ever
        raise
    files = {
        file: Expected(entry.nbytes, entry.sha256)
        for file, entry in manifest.files.items()
        if not (tables_later and is_shard(file))
    }
    fetch_checked(snapshot, files)
    keep_ref(snapshot)
    return snapshot.folder


def tables_on_hub(root: Path) -> str:
    """Return the URL, as fsspec takes it, of the tables of a bundle in the hub's cache."""
    name = name_of(root)
    if name is None:
        raise InputError(
            f"{root}: tables_later is for models on a hub, by their names (hf:org/name); leave it out"
        )
    return f"hf://{name.repository}@{name.revision}/{TABLES}"
