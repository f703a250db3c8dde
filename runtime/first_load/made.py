"""Bundles of checkpoints that are loaded as they are: made once, in the user's cache folder.

    made/<key>/made.json   what the bundle is made of, by which version, and which it is; last used when it was written to
    made/<key>/<name>/     the bundle
    made/<key>.lock        locked by the process that makes or removes it

The key is that of the checkpoint's path and the engine. A bundle takes the place of an older one if a file that
exports of the checkpoint read has another size or time of change, or if another version made that. An export that fails
leaves nothing. It runs in a process of its own, whose memory does not count for the model.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
import unicodedata
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
from stem_edge.files.names import RESERVED, cache_folder, is_plain
from stem_edge.files.trees import make_folders, remove_tree
from stem_edge.graph.formats import EngineName
from stem_edge.hub import PREFIX
from stem_edge.hub.kept import KEY_CHARS, MADE
from stem_edge.hub.names import shown_name
from stem_edge.progress import tell
from stem_edge.runtime.backends.options import AUTO, LoadOptions
from stem_edge.runtime.first_load.making import fetched, make
from stem_edge.shown import printable

RECORD, LOCK = "made.json", ".lock"
MAX_RECORD_NBYTES = 1 << 24
PAUSE_SECONDS = 0.2


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a bundle is made of, and by what."""

    path: str
    files: dict[str, tuple[int, int]]  # size and time of change
    engine: EngineName
    version: str = __version__


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
        return options.open(path)
    except NoBundleError as error:
        return _open(Path(fetched(str(error.found), options.progress)), options)


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
    made.provide(source, options.progress)
    return options.open(made.root / name_of(source))


def name_of(source: Source) -> str:
    """Return the name of a bundle's folder, by which a server calls the model."""
    path = Path(source.path)
    name = _plain_name(shown_name(path).rpartition("/")[2].removesuffix(SUFFIX), MADE)
    return MADE if name.casefold() == RECORD else name


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

    def provide(self, source: Source, show: bool | None) -> None:
        """Make the bundle unless it is there. Raises CheckpointError, ExportError."""
        if self.record() != source:
            making = self._opened(source)
            try:
                self._wait(making, show)
                if self.record() != source:
                    self._make(source, show)
            finally:
                disk.close(making)
        with contextlib.suppress(OSError):
            os.utime(self.root / RECORD)

    def remove(self) -> bool:
        """Delete the folder; False while a process makes it. Raises OSError."""
        making = disk.update(self._lock)
        try:
            if not lock(making):
                return False
            remove_tree(self.root, self.root.parent)
            return True
        finally:
            disk.close(making)

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
            make_folders(self.root)
            make(source.path, bundle, source.engine, show)
            self._write(Record(source, self._manifest(source)))
        except BaseException as error:
            if not (bundle / MANIFEST).is_file():  # else that of an older checkpoint stays
                with contextlib.suppress(OSError):
                    remove_tree(self.root, self.root.parent)
            if not isinstance(error, OSError):
                raise
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

    @property
    def _lock(self) -> Path:
        """File beside the folder that stays when the folder goes, so that all lock the same one."""
        return self.root.with_suffix(LOCK)

    def _opened(self, source: Source) -> int:
        try:
            make_folders(self.root.parent)
            return disk.update(self._lock)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ExportError(
                f"{self.root}: cannot keep the bundle of {source.path} there ({reason}); give another "
                f"folder with cache_dir, or make it elsewhere: stem-edge export {source.path} OUT"
            ) from error

    def _wait(self, making: int, show: bool | None) -> None:
        """Wait for the process that makes the bundle, if there is one."""
        if lock(making):
            return
        tell(f"waiting for the process that makes {self.root}", show)
        while not lock(making):
            time.sleep(PAUSE_SECONDS)


def _plain_name(text: str, otherwise: str) -> str:
    """Turn any text into the name of a file or folder that every system takes unchanged.

    Separators, control characters and reserved ones become `_`; dots and spaces at the end are cut off.
    otherwise: the name of a text of which nothing is left, such as `..`, and of a device.
    """
    plain = "".join(c if c.isprintable() and c not in RESERVED | {"/"} else "_" for c in text)
    name = unicodedata.normalize("NFC", plain).rstrip(". ")
    return name if name and is_plain(name) else otherwise
