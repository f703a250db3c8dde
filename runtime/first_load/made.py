"""Bundles of checkpoints that are loaded as they are: made once, in the user's cache folder.

    made/<key>/made.json   what the bundle is made of, by which version, and which it is; last used when it was written to
    made/<key>/<name>/     the bundle
    made/<key>/in_use      shared by all that load or make it, so that nobody removes it meanwhile
    made/<key>/making      taken by the process that makes it

The key is that of the checkpoint's path and the engine. A bundle takes the place of an older one if a file that
exports of the checkpoint read has another size or time of change, or if another version made that. One that failed or was
interrupted before it had written anything leaves no folder. The export runs in a
process of its own, whose memory does not count for the model, and goes on where it was interrupted.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import weakref
from pathlib import Path

import msgspec

from stem_edge import __version__
from stem_edge.bundle.manifest import BACKBONES, MANIFEST, digest
from stem_edge.bundle.on_hub import NoBundleError
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import ExportError, InputError
from stem_edge.files import disk
from stem_edge.files.checkpoint_files import SUFFIX, file_states, is_checkpoint
from stem_edge.files.disk import write_whole
from stem_edge.files.lock import lock
from stem_edge.files.names import plain_name
from stem_edge.files.trees import make_folders, remove_tree
from stem_edge.graph.formats import EngineName
from stem_edge.hub import PREFIX
from stem_edge.hub.kept import KEY, KEY_CHARS, MADE
from stem_edge.hub.names import shown_name
from stem_edge.progress import tell
from stem_edge.runtime.backends.options import AUTO, LoadOptions
from stem_edge.runtime.first_load.making import fetched, make
from stem_edge.shown import printable
from stem_edge.system.user_folder import cache_folder

RECORD, IN_USE, MAKING = "made.json", "in_use", "making"
LOCK = ".lock"  # of an export
WORKER = "stem_edge.export.worker"
MAX_RECORD_NBYTES = 1 << 24
PAUSE_SECONDS = 0.2
TRIES = 5


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a bundle is made of, and by what."""

    path: str
    files: dict[str, tuple[int, int]]  # size and time of change
    engine: EngineName
    version: str = __version__

    @property
    def is_there(self) -> bool:
        """True if the checkpoint is as it was."""
        with contextlib.suppress(OSError):
            return file_states(Path(self.path)) == self.files
        return False


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a folder is for."""

    source: Source
    manifest: str | None = None  # sha256 of the bundle's, which another export may replace


def open_made(path: str | Path, options: LoadOptions) -> Bundle:
    """Open the bundle of a checkpoint, which is made first if it is not there; or any other bundle.

    One on a hub is fetched. Raises CheckpointError, ExportError, and what opening a bundle raises.
    """
    if is_checkpoint(checkpoint := Path(path)):
        return _open(checkpoint, options)
    name = str(path)
    if name.startswith(PREFIX) and name.endswith(SUFFIX):
        return _open(Path(fetched(name, options.progress)), options)
    try:
        return _kept(options.open(path))
    except NoBundleError as error:
        return _open(Path(fetched(str(error.found), options.progress)), options)


def _kept(bundle: Bundle) -> Bundle:
    """Return a bundle, which nobody removes while it is used if its short name led to one that was made."""
    folder = bundle.path.parent
    ours = folder.parent.name == MADE and KEY.fullmatch(folder.name)
    made = Made(folder)
    if ours and (record := made.read()) is not None:
        weakref.finalize(bundle, disk.close, made.take(record.source))
        with contextlib.suppress(OSError):
            os.utime(made.root / RECORD)
    return bundle


def _open(path: Path, options: LoadOptions) -> Bundle:
    usual, asked = next(iter(BACKBONES)), options.engine
    engine = usual if asked == AUTO else next((name for name in BACKBONES if name == asked), None)
    if engine is None:
        raise InputError(f"engine is {asked!r}; expected {AUTO} or one of {', '.join(BACKBONES)}")
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
    made = Made(cache_folder(options.cache_dir) / MADE / digest(place, engine)[:KEY_CHARS])
    held = made.take(source)
    try:
        made.provide(source, options.progress)
        bundle = options.open(made.root / name_of(source))
    except BaseException:
        disk.close(held)
        made.tidy()
        raise
    weakref.finalize(bundle, disk.close, held)
    return bundle


def name_of(source: Source) -> str:
    """Return the name of a bundle's folder, by which a server calls the model."""
    path = Path(source.path)
    name = plain_name(shown_name(path).rpartition("/")[2].removesuffix(SUFFIX), MADE)
    return MADE if name.casefold() in (RECORD, IN_USE, MAKING) else name


class Made:
    """A folder with a bundle that was made of a checkpoint."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self) -> Record | None:
        """Return what the folder says; None if nothing can be read of that."""
        with contextlib.suppress(OSError, ValueError, RecursionError):
            data = disk.read_file(self.root / RECORD, MAX_RECORD_NBYTES)
            return msgspec.json.decode(data, type=Record)
        return None

    def record(self) -> Source | None:
        """Return what the bundle was made of; None if it is not finished."""
        if (found := self.read()) is None or found.manifest is None:
            return None
        return found.source if found.manifest == self._manifest(found.source) else None

    def take(self, source: Source) -> int:
        """Keep others from removing it until the descriptor is closed. Raises ExportError."""
        try:
            return self._locked(IN_USE, shared=True)
        except OSError as error:
            if self.record() == source:
                # Where nothing can be written, nothing is removed.
                return os.open(self.root / RECORD, os.O_RDONLY)
            reason = error.strerror or str(error)
            raise ExportError(
                f"{self.root}: cannot keep the bundle of {source.path} there ({reason}); give another "
                f"folder with cache_dir, or make it elsewhere: stem-edge export {source.path} OUT"
            ) from error

    def provide(self, source: Source, show: bool | None) -> None:
        """Make the bundle unless it is there. Raises CheckpointError, ExportError."""
        if self.record() != source:
            waiting = f"for the process that makes {self.root}"
            making = self._locked(MAKING, waiting=waiting, show=show)
            try:
                if self.record() != source:
                    self._make(source, show)
            finally:
                disk.close(making)
        with contextlib.suppress(OSError):
            os.utime(self.root / RECORD)

    def tidy(self) -> None:
        """Delete the folder if it has no bundle, and nothing that the next export could go on with."""
        with contextlib.suppress(OSError):
            left = (path for path in self.root.rglob("*") if path.is_file())
            if all(path.name in (RECORD, IN_USE, MAKING) or path.suffix == LOCK for path in left):
                self.remove()

    def remove(self) -> bool:
        """Delete the folder; False if a process uses it. Raises OSError."""
        return remove_tree(self.root, self.root.parent, IN_USE)

    def _make(self, source: Source, show: bool | None) -> None:
        bundle = self.root / name_of(source)
        if bundle.is_dir() and not (bundle / MANIFEST).is_file():  # an export would not replace it
            with contextlib.suppress(OSError):
                remove_tree(bundle, self.root)
        tell(
            f"making a bundle of {printable(Path(source.path).name)}, once, in {self.root}; "
            "stem-edge list shows it",
            show,
        )
        try:
            if self.read() is None:  # otherwise the old bundle keeps its record until then
                self._write(Record(source))
            make(source.path, bundle, source.engine, show)
            self._write(Record(source, self._manifest(source)))
        except OSError as error:
            reason = error.strerror or str(error)
            raise ExportError(
                f"{self.root}: cannot write ({reason}); free some space there, and try again"
            ) from error

    def _manifest(self, source: Source) -> str | None:
        with contextlib.suppress(OSError):
            return hashlib.sha256((self.root / name_of(source) / MANIFEST).read_bytes()).hexdigest()
        return None

    def _write(self, record: Record) -> None:
        write_whole(self.root / RECORD, msgspec.json.encode(record), durable=True)

    def _locked(
        self, name: str, *, shared: bool = False, waiting: str = "", show: bool | None = None
    ) -> int:
        """Return the descriptor of a locked file, which whoever removes the folder may delete meanwhile."""
        while True:
            descriptor = self._opened(name)
            try:
                if lock(descriptor, shared=shared) and _is_at(descriptor, self.root / name):
                    return descriptor
            except BaseException:
                disk.close(descriptor)
                raise
            disk.close(descriptor)
            if waiting:
                tell(f"waiting {waiting}", show)
            waiting = ""
            time.sleep(PAUSE_SECONDS)

    def _opened(self, name: str) -> int:
        """Open a file of the folder, which may be removed meanwhile. Raises OSError."""
        for _ in range(TRIES):
            with contextlib.suppress(FileNotFoundError):
                make_folders(self.root)
                return disk.update(self.root / name)
        make_folders(self.root)
        return disk.update(self.root / name)


def _is_at(descriptor: int, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False
