"""Fetch a bundle from a model hub into the hub's cache, and check its hashes."""

from __future__ import annotations

from pathlib import Path

from stem_edge.bundle.fetched import fetch_checked
from stem_edge.bundle.hub.asking import UnreachableError
from stem_edge.bundle.hub.fetch import Snapshot, fetch, open_snapshot
from stem_edge.bundle.hub.names import HubName, parsed_name
from stem_edge.bundle.manifest import MANIFEST, is_shard, open_manifest
from stem_edge.errors import BundleError


class NoBundleError(BundleError):
    def __init__(self, found: HubName, asked: HubName) -> None:
        super().__init__(
            f"{asked}: not a bundle, it has no {MANIFEST}; make one with: stem-edge export {asked} OUT"
        )
        self.found = found  # with its commit


def fetched_folder(path: str, *, shards: bool, progress: bool | None) -> Path:
    """Fetch the missing files of a bundle into the hub's cache; return its folder there.

    shards: False leaves out the table shards. Raises BundleError, HubError, InputError.
    """
    name = parsed_name(path)
    snapshot = open_snapshot(name, progress)
    if snapshot.missing([MANIFEST]) and not _is_listed(snapshot):
        raise NoBundleError(snapshot.name, name)
    fetch(snapshot, [MANIFEST])
    try:
        manifest = open_manifest(snapshot.folder)
    except BundleError as error:
        raise BundleError(
            f"{error}; or delete {snapshot.folder.parents[1]}, and fetch it again"
        ) from error
    files = {
        file: entry.sha256 for file, entry in manifest.files.items() if shards or not is_shard(file)
    }
    fetch_checked(snapshot, files)
    return snapshot.folder


def _is_listed(snapshot: Snapshot) -> bool:
    """Return True if the hub lists a manifest for this model. Raises HubError."""
    try:
        return MANIFEST in snapshot.listing
    except UnreachableError:
        if snapshot.folder.is_dir():  # a bundle would have its manifest, which is fetched first
            return False
        raise
