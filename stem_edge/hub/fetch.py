"""Fetching files of a model into the hub's own cache, where other programs find them, too.

A name is resolved to a commit first, so that all files are of one state of the model. What is there
already is not asked for again. Without a network, what the cache has is used.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from glob import escape
from pathlib import Path
from typing import Any

from tqdm import tqdm

from stem_edge import __version__
from stem_edge.errors import HubError
from stem_edge.files import disk
from stem_edge.files.hub_links import BLOBS, COMMIT, SNAPSHOTS
from stem_edge.files.strict_json import one_line
from stem_edge.files.whole_file import write_whole
from stem_edge.hub.asking import ANSWER_SECONDS, CutError, UnreachableError, asking, endpoint
from stem_edge.hub.names import HubName, hub_name
from stem_edge.progress import tell
from stem_edge.units import format_size

MAIN = "main"
WORKERS = 4  # files at a time; each takes some 60 MB of memory
TRIES = 5  # in a row that complete no file
PAUSE_SECONDS = 1.0  # before the second try; twice as long before each further one
UNFINISHED = re.compile(r"(.+)\.[0-9a-f]{8}\.incomplete")


@dataclass(frozen=True)
class HubFile:
    """A file of a model on the hub."""

    nbytes: int
    blob: str  # its name among the cache's blobs


@dataclass(frozen=True)
class Snapshot:
    """A commit of a model, and the folder of the hub's cache for its files."""

    name: HubName  # with the commit
    folder: Path
    progress: bool | None = None  # show a bar on stderr; None: if that is a terminal
    ref: Path | None = (
        None  # the file that says which commit a revision is; None: a commit was asked
    )

    def lacking(self, files: Collection[str]) -> list[str]:
        """Return the files that are not in the folder yet."""
        return [file for file in files if not (self.folder / file).exists()]

    @cached_property
    def listing(self) -> Mapping[str, HubFile]:
        """All files of this commit by name; the hub is asked once. Raises HubError."""
        with asking(self.name):
            info = hub_api().model_info(
                self.name.repository,
                revision=self.name.revision,
                files_metadata=True,
                timeout=ANSWER_SECONDS,
            )
        return {
            file.rfilename: HubFile(
                file.size or 0, file.lfs.sha256 if file.lfs else file.blob_id or ""
            )
            for file in info.siblings or ()
        }


def hub_api() -> Any:
    """Return what asks the hub."""
    from huggingface_hub import HfApi

    return HfApi(endpoint(), library_name="stem-edge", library_version=__version__)


def cache() -> Path:
    """Return the folder in which the hub's libraries keep models."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def pinned(path: str | Path, progress: bool | None = None) -> str:
    """Return the name of a model with its commit, so that later uses mean the same; or the path.

    Raises HubError, InputError.
    """
    name = hub_name(path)
    if name is None:
        return str(path)
    snapshot = open_snapshot(name, progress)
    # Later it cannot be seen whether all files came, so keep an older commit until some are there.
    if snapshot.ref and (snapshot.folder.is_dir() or kept_commit(snapshot.ref) is None):
        keep_ref(snapshot)
    return str(snapshot.name)


def open_snapshot(name: HubName, progress: bool | None = None) -> Snapshot:
    """Resolve a name to a commit, and tell it. Raises HubError."""
    commit = _resolve(name, progress)
    folder = cache() / name.folder / SNAPSHOTS / (commit.revision or "")
    return Snapshot(commit, folder, progress, None if name.pinned else _ref(name))


def keep_ref(snapshot: Snapshot) -> None:
    """Write down which commit a revision is, when the files that were wanted are there.

    Without a network, the name then means this commit.
    """
    if snapshot.ref is not None:
        with suppress(OSError):  # a cache that cannot be written may have all files
            snapshot.ref.parent.mkdir(parents=True, exist_ok=True)
            write_whole(snapshot.ref, snapshot.folder.name.encode())


def _ref(name: HubName) -> Path:
    return cache() / name.folder / "refs" / (name.revision or MAIN)


def _resolve(name: HubName, progress: bool | None) -> HubName:
    if name.pinned:
        return name
    try:
        with asking(name):
            info = hub_api().model_info(
                name.repository, revision=name.revision, timeout=ANSWER_SECONDS
            )
    except UnreachableError as error:
        commit = kept_commit(_ref(name))
        if commit is None:
            raise
        said = str(error).removeprefix(f"{name}: ").partition(";")[0]
        tell(f"{name} is commit {commit} in the cache; {said}", progress)
        return name.at(commit)
    if info.sha is None or not COMMIT.fullmatch(info.sha):
        raise HubError(
            f"{name}: the hub names no commit, but {one_line(ascii(info.sha))}; set HF_ENDPOINT to a hub"
        )
    tell(f"{name} is commit {info.sha}", progress)
    return name.at(info.sha)


def kept_commit(ref: Path) -> str | None:
    """Return the commit that a revision was when the hub was last asked, if it is in the cache.

    ref: the file in the hub's cache that says so.
    """
    with suppress(OSError, UnicodeError):
        commit = ref.read_text("ascii").strip()
        if COMMIT.fullmatch(commit) and (ref.parents[1] / SNAPSHOTS / commit).is_dir():
            return commit
    return None


def fetch(snapshot: Snapshot, files: Collection[str]) -> None:
    """Fetch the files that are not in the snapshot's folder yet. Raises HubError.

    Goes on after cut connections until several tries in a row have completed no file.
    """
    missing = snapshot.lacking(files)
    if not missing:
        return
    listing = snapshot.listing
    if absent := [file for file in missing if file not in listing]:
        raise HubError(
            f"{snapshot.name}: has no file {one_line(absent[0])}, nor {len(absent) - 1} others that are needed; "
            "ask whoever pushed it to push it again"
        )
    _remove_unfinished(snapshot)
    _check_space(snapshot, {listing[file] for file in missing})
    tries = 0
    while missing:
        try:
            with asking(snapshot.name):
                _download(snapshot, files)
            missing = []
        except CutError:
            left = snapshot.lacking(files)
            tries = tries + 1 if len(left) == len(missing) else 1
            if tries >= TRIES or not left:
                raise
            missing = left
            time.sleep(PAUSE_SECONDS * 2 ** (tries - 1))


def _download(snapshot: Snapshot, files: Collection[str]) -> None:
    from huggingface_hub import snapshot_download

    # Each name is compared with each pattern, and there may be thousands of both, so the fewer are
    # written: most often a README is all that is not wanted.
    others = [escape(file) for file in snapshot.listing.keys() - set(files)]
    wanted = [escape(file) for file in files] if len(files) < len(others) else None
    snapshot_download(
        snapshot.name.repository,
        revision=snapshot.name.revision,
        cache_dir=cache(),
        endpoint=endpoint(),
        allow_patterns=wanted,
        ignore_patterns=None if wanted else others,
        max_workers=WORKERS,
        tqdm_class=_SilentBar if snapshot.progress is False else _Bar,
        library_name="stem-edge",
        library_version=__version__,
    )


class _Bar(tqdm):  # type: ignore[misc]
    """The one of huggingface_hub's bars that counts bytes; on a terminal only."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.pop("name", None)
        shown = options.get("unit") == "B" and not str(options.get("desc")).startswith("Recon")
        super().__init__(*args, **options | {"disable": None if shown else True, "leave": False})


class _SilentBar(tqdm):  # type: ignore[misc]
    def __init__(self, *args: Any, **options: Any) -> None:
        options.pop("name", None)
        super().__init__(*args, **options | {"disable": True})


def _check_space(snapshot: Snapshot, files: Collection[HubFile]) -> None:
    """Raise HubError unless there is room for the files that no other commit has already."""
    blobs = snapshot.folder.parents[1] / BLOBS
    needed = sum(file.nbytes for file in files if not (blobs / (file.blob or ".")).is_file())
    root = next(folder for folder in snapshot.folder.parents if folder.is_dir())
    free = shutil.disk_usage(root).free
    if needed > free:
        raise HubError(
            f"{snapshot.name}: needs {format_size(needed)} more, and {root} has {format_size(free)} "
            "free; free some space, or set HF_HUB_CACHE to a folder on a larger disk"
        )


def _remove_unfinished(snapshot: Snapshot) -> None:
    """Delete what killed processes left: huggingface_hub never goes on with these files."""
    for path in _unfinished(snapshot.folder.parents[1] / BLOBS):
        with suppress(OSError):
            path.unlink()


def _unfinished(blobs: Path) -> Iterator[Path]:
    """Yield the files that no running process downloads, which would hold a lock."""
    from filelock import FileLock, Timeout

    locks = blobs.parents[1] / ".locks" / blobs.parent.name
    for path in blobs.glob("*.incomplete"):
        found = UNFINISHED.fullmatch(path.name)
        if found is None:
            continue
        with suppress(Timeout, OSError), FileLock(locks / f"{found[1]}.lock", timeout=0):
            yield path


def _says(snapshot: Snapshot, file: str, sha256: str | None) -> bool:
    """Return whether the hub says that a file has this hash; not if it does not answer."""
    with suppress(HubError):
        return (
            sha256 is not None
            and file in snapshot.listing
            and snapshot.listing[file].blob == sha256
        )
    return False


def remove(snapshot: Snapshot, file: str, sha256: str | None = None) -> None:
    """Delete a wrong file from the cache, so that it is fetched again.

    sha256: what it should have. One that other models may share is deleted only if the hub says the
    same; otherwise any manifest could delete it.
    """
    path = snapshot.folder / file
    places = {path}
    with suppress(OSError):  # raised for a link that is not the hub's, which alone is deleted
        blob = disk.plain(path)
        if blob != path:
            link = Path(os.path.normpath(path.parent.resolve() / path.readlink()))
            places.add(link)
            if link == blob or _says(snapshot, file, sha256):  # else it is a link to a shared one
                places.add(blob)
    for place in places:
        with suppress(OSError):
            place.unlink()
