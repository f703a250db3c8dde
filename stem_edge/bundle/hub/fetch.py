"""Fetch files of a model on a hub with huggingface_hub, into the cache that it shares."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from glob import escape
from pathlib import Path
from typing import Any

from tqdm import tqdm

from stem_edge import __version__
from stem_edge.bundle.hub.asking import UnreachableError, asking
from stem_edge.bundle.hub.names import HubName, hub_name
from stem_edge.errors import HubError
from stem_edge.files.disk import write_whole
from stem_edge.files.hub_links import COMMIT, SNAPSHOTS
from stem_edge.progress import tell
from stem_edge.shown import one_line

MAIN = "main"
WORKERS = 4  # files at a time; each takes some 60 MB of memory
ANSWER_SECONDS = 10.0  # of silence; huggingface_hub itself would wait for ever for a listing


@dataclass(frozen=True)
class Snapshot:
    """A commit of a model on a hub, and its folder in the hub's cache."""

    name: HubName  # with the commit
    folder: Path
    progress: bool | None = None  # show a bar on stderr; None: if that is a terminal

    def missing(self, files: Collection[str]) -> list[str]:
        return [file for file in files if not (self.folder / file).exists()]

    @cached_property
    def listing(self) -> Collection[str]:
        """Names of all files of this commit. The first use asks the hub. Raises HubError."""
        return {file.rfilename for file in _info(self.name).siblings or ()}


def cache() -> Path:
    """Return the folder of the hub's cache, which all programs with huggingface_hub share."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def pinned(path: str | Path, progress: bool | None = None) -> str:
    """Add the current commit to the name of a model on a hub, so that its files stay the same.

    Other paths are returned unchanged. Raises HubError, InputError.
    """
    name = hub_name(path)
    return str(path) if name is None else str(open_snapshot(name, progress).name)


def open_snapshot(name: HubName, progress: bool | None = None) -> Snapshot:
    """Resolve a name to a commit, and print the commit to stderr. Raises HubError."""
    commit = name if name.pinned else _resolve(name, progress)
    return Snapshot(commit, cache() / name.folder / SNAPSHOTS / (commit.revision or ""), progress)


def kept_commit(ref: Path) -> str | None:
    """Return the last known commit of a branch; None if the cache does not have that commit.

    ref: the file in the hub's cache that records the commit.
    """
    with suppress(OSError, UnicodeError):
        commit = ref.read_text("ascii").strip()
        if COMMIT.fullmatch(commit) and (ref.parents[1] / SNAPSHOTS / commit).is_dir():
            return commit
    return None


def fetch(snapshot: Snapshot, files: Collection[str]) -> None:
    """Fetch the files that are not in the snapshot's folder yet. Raises HubError."""
    missing = snapshot.missing(files)
    if not missing:
        return
    if absent := [file for file in missing if file not in snapshot.listing]:
        raise HubError(
            f"{snapshot.name}: has no file {one_line(absent[0])}, nor {len(absent) - 1} others that are needed; "
            "ask whoever pushed it to push it again"
        )
    from huggingface_hub import snapshot_download

    with asking(snapshot.name):
        snapshot_download(
            snapshot.name.repository,
            revision=snapshot.name.revision,
            cache_dir=cache(),
            endpoint=os.environ.get("HF_ENDPOINT"),
            allow_patterns=[escape(file) for file in missing],
            max_workers=WORKERS,
            tqdm_class=type("Bar", (_Bar,), {"hidden": snapshot.progress is False or None}),
            library_name="stem-edge",
            library_version=__version__,
        )


def _resolve(name: HubName, progress: bool | None) -> HubName:
    """Resolve the branch of a name to its commit; if offline, to the last known commit."""
    ref = cache() / name.folder / "refs" / (name.revision or MAIN)
    try:
        sha = _info(name).sha
    except UnreachableError as error:
        commit = kept_commit(ref)
        if commit is None:
            raise
        said = str(error).removeprefix(f"{name}: ").partition(";")[0]
        tell(f"{name} is commit {commit} in the cache; {said}", progress)
        return replace(name, revision=commit)
    if sha is None or not COMMIT.fullmatch(sha):
        raise HubError(
            f"{name}: the hub names no commit, but {one_line(ascii(sha))}; set HF_ENDPOINT to a hub"
        )
    with suppress(OSError):  # a cache that cannot be written may have all files
        ref.parent.mkdir(parents=True, exist_ok=True)
        write_whole(ref, sha.encode())
    tell(f"{name} is commit {sha}", progress)
    return replace(name, revision=sha)


def _info(name: HubName) -> Any:
    """Ask the hub for a model's commit and files. Raises HubError."""
    from huggingface_hub import HfApi

    api = HfApi(
        os.environ.get("HF_ENDPOINT"), library_name="stem-edge", library_version=__version__
    )
    with asking(name):
        return api.model_info(name.repository, revision=name.revision, timeout=ANSWER_SECONDS)


class _Bar(tqdm):  # type: ignore[misc]
    """A progress bar of huggingface_hub, shown on a terminal only."""

    hidden: bool | None = None  # None: unless stderr is a terminal

    def __init__(self, *args: Any, **options: Any) -> None:
        options.pop("name", None)
        super().__init__(*args, **options | {"disable": self.hidden, "leave": False})
