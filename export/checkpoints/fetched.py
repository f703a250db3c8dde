"""Downloads a checkpoint from a model hub: only the files that this project's readers use."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from stem_edge.bundle.fetched import fetch_checked
from stem_edge.bundle.hub import PREFIX
from stem_edge.bundle.hub.asking import UnreachableError
from stem_edge.bundle.hub.fetch import Snapshot, fetch, open_snapshot
from stem_edge.bundle.hub.names import hub_name
from stem_edge.bundle.manifest import MANIFEST
from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.blagpt import STATES
from stem_edge.export.checkpoints.hugging_face.reader import CONFIG
from stem_edge.export.checkpoints.lingua import BACKBONE, PARAMS, SHARDS, TABLES
from stem_edge.export.tensor_files.json import one_line
from stem_edge.export.tensor_files.safetensors import INDEX, WEIGHTS, read_index
from stem_edge.files.checkpoint_files import SUFFIX, TOKENIZERS

ON_HUB = re.compile(rf"({PREFIX}[^:]+):([^:]+{re.escape(SUFFIX)})")
SHA256 = re.compile(r"[0-9a-f]{64}")
FORMS = {  # file by which a trainer is recognized -> patterns of the files to read
    CONFIG: (CONFIG, WEIGHTS, INDEX, "generation_config.json"),
    PARAMS: (PARAMS, BACKBONE, TABLES, f"{SHARDS}/*.pt"),
}


def checkpoint_folder(
    path: str | Path,
    progress: bool | None = None,
    tensors: Callable[[str], bool] = lambda name: True,
) -> Path:
    """Return a checkpoint's local path. A checkpoint on a hub is first fetched to the hub's cache.

    path: local path, or hf:org/name or hf:org/name:FILE.gguf for a hub. tensors: returns True for a
    needed tensor's name; only files with such tensors are fetched. Raises HubError, CheckpointError, InputError.
    """
    named = ON_HUB.fullmatch(str(path))
    name = hub_name(path if named is None else named[1])
    if name is None:
        return Path(path)
    snapshot = open_snapshot(name, progress)
    folder, file = snapshot.folder, "" if named is None else named[2]
    try:
        listing = snapshot.listing
    except UnreachableError:
        if not any((folder / each).is_file() for each in ([file] if file else FORMS)):
            raise
        return folder / file  # the reader complains if files are missing
    if file and file not in listing:
        raise CheckpointError(
            f"{snapshot.name}: has no file {one_line(file)}, found "
            f"{one_line(', '.join(_ggufs(listing)) or 'no GGUF files', 400)}; give one of those it has"
        )
    files = [file] if file else needed(listing, snapshot)
    _fetch(snapshot, files)
    if INDEX in files:
        _fetch(snapshot, sorted(path.name for path in read_index(folder, tensors)))
    return folder / file


def _ggufs(listing: Iterable[str]) -> list[str]:
    return sorted(file for file in listing if file.endswith(SUFFIX))


def needed(listing: Iterable[str], snapshot: Snapshot) -> list[str]:
    """Choose from a hub repository's file names which files to download. Raises CheckpointError."""
    files = set(listing)
    if MANIFEST in files:
        raise CheckpointError(
            f"{snapshot.name}: is a bundle; give the checkpoint that it was made from"
        )
    patterns = next((found for told, found in FORMS.items() if told in files), None)
    states = [n for state in STATES for n in _matching(files, [state])]
    chosen = states[-1:] if patterns is None else _matching(files, patterns)
    if not chosen and (ggufs := _ggufs(files)):
        raise CheckpointError(
            f"{snapshot.name}: has GGUF files, {one_line(', '.join(ggufs), 400)}; give one of them, "
            f"like {PREFIX}{snapshot.name.repository}:{one_line(ggufs[0])}"
        )
    if not chosen:
        found = ", ".join(sorted(files)[:8])
        raise CheckpointError(
            f"{snapshot.name}: has neither {CONFIG} nor {PARAMS} nor {STATES[1]}, found {one_line(found)}; give a "
            "model with safetensors, or of the public STEM trainer or BlaGPT"
        )
    if WEIGHTS in chosen and INDEX in chosen:  # the reader needs no index then
        chosen.remove(INDEX)
    return chosen + _matching(files - {*chosen}, TOKENIZERS)


def _matching(files: set[str], patterns: Iterable[str]) -> list[str]:
    depth = {pattern: pattern.count("/") for pattern in patterns}
    return sorted(
        file
        for file in files
        if any(file.count("/") == n and Path(file).match(p) for p, n in depth.items())
    )


def _fetch(snapshot: Snapshot, files: list[str]) -> None:
    """Download files to the hub's cache, and verify those that the cache names by their sha256."""
    fetch(snapshot, files)
    links = [file for file in files if (snapshot.folder / file).is_symlink()]
    blobs = {file: (snapshot.folder / file).readlink().name for file in links}
    fetch_checked(snapshot, {file: blob for file, blob in blobs.items() if SHA256.fullmatch(blob)})
