"""Bundles that `load` makes from checkpoints: made once, in the user's cache folder.

    made/<key>/made.json   source, version and name of the bundle; its modification time is the last use
    made/<key>/<name>/     the bundle
    made/<key>.lock        locked by the process that makes or removes the bundle

The key depends on the checkpoint's path and the engine. A bundle is made again if the size or modification time of
a checkpoint file has changed, or if another version of this package made the bundle. A failed export leaves no
files. An export runs in a separate process, so that all its memory is free again when it ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from functools import partial
from pathlib import Path

import msgspec

from stem_edge import __version__
from stem_edge.bundle.hub import PREFIX
from stem_edge.bundle.hub.kept import KEY_CHARS, MADE
from stem_edge.bundle.hub.names import shown_name
from stem_edge.bundle.manifest import FORMAT_VERSION, MANIFEST, digest
from stem_edge.bundle.on_hub import NoBundleError
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import ExportError, InputError, OutOfMemoryError
from stem_edge.files import disk
from stem_edge.files.checkpoint_files import SUFFIX, file_states, is_checkpoint
from stem_edge.files.disk import write_whole
from stem_edge.files.lock import alone, lock
from stem_edge.files.names import cache_folder
from stem_edge.files.trees import make_folders, remove_tree
from stem_edge.graph.formats import ENGINES, EngineName
from stem_edge.progress import tell
from stem_edge.runtime.backends.options import AUTO, LoadOptions
from stem_edge.runtime.first_load.making import fetched, make
from stem_edge.shown import format_size, printable
from stem_edge.system.memory import available_memory

RECORD, LOCK = "made.json", ".lock"
MAX_RECORD_NBYTES = 1 << 24
MAKING_NBYTES = 10**9  # memory to export a checkpoint folder: 934 MB were measured


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The checkpoint files, engine and package version from which a bundle is made."""

    path: str
    files: dict[str, tuple[int, int]]  # name -> size, modification time
    engine: EngineName
    version: str = f"{__version__}, format {FORMAT_VERSION}"
    manifest: str = ""  # sha256 of the finished bundle's manifest, which another export may replace


def open_made(path: str | Path, options: LoadOptions) -> Bundle:
    """Open a bundle. If path is a checkpoint, first make its bundle, unless that bundle is cached.

    A checkpoint on a hub is fetched. Raises CheckpointError, ExportError, and the errors of opening a bundle.
    """
    if is_checkpoint(checkpoint := Path(path)):
        return _open(checkpoint, options)
    name = str(path)
    if name.startswith(PREFIX) and name.endswith(SUFFIX):
        return _open(Path(fetched(name, options.progress)), options)
    try:
        return options.open(path)
    except NoBundleError as error:
        return _open(Path(fetched(str(error.found), options.progress)), options)


def _open(path: Path, options: LoadOptions) -> Bundle:
    usual, asked = ENGINES[0], options.engine
    engine = usual if asked == AUTO else next((name for name in ENGINES if name == asked), None)
    if engine is None:
        raise InputError(f"engine is {asked!r}; expected {AUTO} or one of {', '.join(ENGINES)}")
    # A link to a file is kept, because its target in a hub's cache has another name.
    place = str(path.resolve() if path.is_dir() else path.parent.resolve() / path.name)
    try:
        source = Source(place, file_states(path), engine)
    except OSError as error:
        raise InputError(
            f"{path}: cannot read ({error.strerror}); check its permissions"
        ) from error
    try:
        msgspec.json.encode(source)
    except UnicodeEncodeError as error:
        raise InputError(
            f"{printable(error.object)}: the name of a file is not UTF-8; rename it"
        ) from error
    root = cache_folder(options.cache_dir) / MADE / digest(place, engine)[:KEY_CHARS]
    _provide(root, source, options.progress)
    return options.open(root / name_of(source))


def name_of(source: Source) -> str:
    """Return the folder name of a source's bundle, which is also the model's name in a server.

    Path separators are replaced: the name of a checkpoint on a hub must not lead out of the cache folder.
    """
    name = shown_name(Path(source.path)).rpartition("/")[2].removesuffix(SUFFIX)
    plain = "".join(c if c.isprintable() and c not in "\\/:" else "_" for c in name).rstrip(". ")
    return MADE if plain.casefold() in ("", RECORD) else plain


def made_of(root: Path) -> Source | None:
    """Return what the bundle in a cache folder was made from; None if no complete bundle is there."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        data = disk.read_file(root / RECORD, MAX_RECORD_NBYTES)
        found = msgspec.json.decode(data, type=Source)
        if found.manifest == _manifest(root / name_of(found)):
            return msgspec.structs.replace(found, manifest="")
    return None


def remove(root: Path) -> bool:
    """Delete the cached bundle in folder `root`; False if a process is making it now. Raises OSError."""
    making = disk.update(_lock(root))
    try:
        if not lock(making):
            return False
        if (aside := root.with_suffix(".removed")).is_dir():  # left by a process that was killed
            remove_tree(aside, root.parent)
        disk.rename(root, aside)  # if this is not permitted, nothing is lost
        remove_tree(aside, root.parent)
        return True
    finally:
        disk.close(making)


def _provide(root: Path, source: Source, progress: bool | None) -> None:
    """Make the bundle of `source` in folder `root` if needed. Raises CheckpointError, ExportError."""
    if made_of(root) != source:
        waiting = partial(tell, f"waiting for the process that makes {root}", progress)
        try:
            make_folders(root.parent)
            with alone(_lock(root), waiting):
                if made_of(root) != source:
                    _make(root, source, progress)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ExportError(
                f"{root}: cannot keep the bundle of {source.path} there ({reason}); free some space, give "
                f"another folder with cache_dir, or make it elsewhere: stem-edge export {source.path} OUT"
            ) from error
    with contextlib.suppress(OSError):
        os.utime(root / RECORD)


def _make(root: Path, source: Source, progress: bool | None) -> None:
    bundle = root / name_of(source)
    if bundle.is_dir() and not (bundle / MANIFEST).is_file():  # an export would not replace it
        with contextlib.suppress(OSError):
            remove_tree(bundle, root)
    path = Path(source.path)
    how = ", which takes minutes" * path.is_dir()
    needed = min(MAKING_NBYTES, 2 * sum(size for size, _ in source.files.values()) + (200 << 20))
    if path.is_dir() and (free := available_memory()) < needed:
        raise OutOfMemoryError(
            f"{path}: making its bundle takes up to {format_size(needed)} of memory, and {format_size(free)} "
            "are free; free some, or export it on a larger machine"
        )
    tell(f"reading {printable(path.name)} to make a bundle of it, once, in {root}{how}", progress)
    try:
        make_folders(root)
        make(source.path, bundle, source.engine, progress)
        record = msgspec.structs.replace(source, manifest=_manifest(bundle))
        write_whole(root / RECORD, msgspec.json.encode(record), durable=True)
    except BaseException:
        if not (bundle / MANIFEST).is_file():  # else the bundle of an older checkpoint stays
            with contextlib.suppress(OSError):
                remove_tree(root, root.parent)
        raise


def _manifest(bundle: Path) -> str:
    return hashlib.sha256((bundle / MANIFEST).read_bytes()).hexdigest()


def _lock(root: Path) -> Path:
    """Return the path of the lock file. It is outside the folder, so it outlasts the folder."""
    return root.with_suffix(LOCK)
