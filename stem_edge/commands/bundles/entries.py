"""What lies in the user's cache folder. All of it can be deleted: what is needed is made again.

made/<key>/        bundle of a checkpoint that was loaded as it is (stem_edge.runtime.first_load.made)
prepared/<key>/    backbone rearranged for one processor and onnxruntime
counts/<key>.npy   how often each token was used with one bundle
tokenizers/<key>-<key>  tokenizer as it was checked, read by parts
ggml/<key>.json    result: this library of ggml computes what it should
checked/<key>      mark: the files of a model on a hub have the right hashes
prefixes/<key>-<key>.safetensors  keys and values of a prompt
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path

import msgspec
import onnxruntime as ort

from stem_edge import __version__
from stem_edge.bundle.fetched import CHECKED, marked_folder
from stem_edge.bundle.manifest import MANIFEST
from stem_edge.errors import StemEdgeError
from stem_edge.files.trees import remove_tree
from stem_edge.ggml import check as ggml_check
from stem_edge.hub.kept import KEY, MADE
from stem_edge.runtime.backends.onnxruntime.prepared import FOLDER as PREPARED
from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import read_prepared
from stem_edge.runtime.backends.onnxruntime.prepared.preparing import TEMPORARY, is_left
from stem_edge.runtime.first_load.made import RECORD, Made
from stem_edge.runtime.prefixes.file import PREFIX_NAME, TEMPORARY_NAME
from stem_edge.runtime.prefixes.folder import FOLDER as PREFIXES
from stem_edge.runtime.rows.warm import COUNTS
from stem_edge.runtime.text.kept import TOKENIZERS, readers
from stem_edge.system.processor import cpu_digest
from stem_edge.system.user_folder import KEY_CHARS
from stem_edge.units import format_size

_KEY = rf"[0-9a-f]{{{KEY_CHARS}}}"
# Kind of entry, and name of its folder in the cache folder -> names that stem-edge gives there.
OURS = {
    MADE: KEY,
    PREPARED: re.compile(rf"{_KEY}|{re.escape(TEMPORARY)}{_KEY}"),
    COUNTS: re.compile(rf"{_KEY}\.npy"),
    TOKENIZERS: re.compile(f"{_KEY}-{_KEY}"),
    ggml_check.FOLDER: re.compile(rf"{_KEY}\.json"),
    CHECKED: re.compile(_KEY),
    PREFIXES: re.compile(f"{PREFIX_NAME.pattern}|{TEMPORARY_NAME.pattern}"),
}


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the cache folder."""

    path: Path
    kind: str
    nbytes: int
    of: str = ""  # path of the bundle or checkpoint that it belongs to
    old: str = ""  # why it will not be used again; empty if it may be used
    used: str = ""  # last day of use; empty where none is known

    def __str__(self) -> str:
        """Return a line for people."""
        used, old = self.used and f"used {self.used}", self.old and f"old: {self.old}"
        sized = f"{format_size(self.nbytes):>9}  {self.kind:<10} {self.path.name:<36}"
        return " ".join(part for part in (sized, self.of, used, old) if part).rstrip()

    def remove(self) -> bool:
        """Delete it; return False while a process makes it. Raises StemEdgeError."""
        try:
            if self.kind == MADE:
                return Made(self.path).remove()
            if self.kind == PREPARED:
                remove_tree(self.path, self.path.parent)
            else:
                self.path.unlink()
        except OSError as error:
            raise StemEdgeError(
                f"{self.path}: cannot remove ({error.strerror}); check its permissions, and try again"
            ) from error
        return True


def entries(root: Path) -> Iterator[Entry]:
    """Yield everything in the cache folder that stem-edge put there, kind by kind."""
    for kind, names in OURS.items():
        for path in sorted((root / kind).glob("*")):
            folder = kind in (MADE, PREPARED)
            # --cache-dir may name any folder with files of somebody else, and links lead elsewhere.
            if not names.fullmatch(path.name) or path.is_symlink() or path.is_dir() != folder:
                continue
            of, old, used = "", "", ""
            if kind == MADE:
                of, old, used = _made(path)
            elif kind == PREPARED:
                of, old = _prepared(path)
            elif kind == CHECKED:
                of = marked_folder(path)
                old = "" if of and Path(of).is_dir() else "its model is gone"
            elif kind == TOKENIZERS and not path.name.startswith(readers()):
                old = "made by another stem-edge or another version of a library"
            yield Entry(path=path, kind=kind, nbytes=_nbytes(path), of=of, old=old, used=used)


def belonging(found: list[Entry], folder: Path) -> list[Entry]:
    """Return the entries that are in a folder, or were made for a bundle in it."""
    within = f"{folder.resolve()}{os.sep}"
    return [e for e in found if f"{e.path.resolve()}{os.sep}" == within or e.of.startswith(within)]


def _nbytes(place: Path) -> int:
    """Return the bytes of a file, or of a folder's files; another process may delete some meanwhile."""
    nbytes = 0
    for path in (place, *place.rglob("*")):
        with suppress(OSError):
            nbytes += path.lstat().st_size if path.is_file() else 0
    return nbytes


def _made(path: Path) -> tuple[str, str, str]:
    made = Made(path)
    of = "" if (known := made.read()) is None else known.source.path
    if (source := made.record()) is None:
        return of, "was not finished", ""
    old = "" if source.version == __version__ else "made by another stem-edge"
    old = old if source.is_there else "its checkpoint is gone or has changed"
    with suppress(OSError):
        return of, old, str(date.fromtimestamp((path / RECORD).stat().st_mtime))
    return of, old, ""


def _prepared(folder: Path) -> tuple[str, str]:
    if folder.name.startswith(TEMPORARY):
        return "", "was not finished" if is_left(folder) else ""
    if (record := read_prepared(folder)) is None:
        return "", "damaged"
    if record.onnxruntime != ort.__version__:
        return record.bundle, f"made by onnxruntime {record.onnxruntime}"
    if record.cpu != cpu_digest():
        return record.bundle, "made for another processor"
    gone = not (Path(record.bundle) / MANIFEST).is_file()
    return record.bundle, "its bundle is gone" if gone else ""
