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

from stem_edge.bundle.fetched import CHECKED, marked_folder
from stem_edge.errors import StemEdgeError
from stem_edge.files.names import KEY_CHARS
from stem_edge.files.trees import remove_tree
from stem_edge.ggml import check as ggml_check
from stem_edge.hub.kept import KEY, MADE
from stem_edge.runtime.backends.onnxruntime.prepared import FOLDER as PREPARED
from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import read_prepared
from stem_edge.runtime.backends.onnxruntime.prepared.preparing import TEMPORARY
from stem_edge.runtime.first_load.made import Made
from stem_edge.runtime.prefixes.file import PREFIX_NAME, TEMPORARY_NAME
from stem_edge.runtime.prefixes.folder import FOLDER as PREFIXES
from stem_edge.runtime.rows.warm import COUNTS
from stem_edge.runtime.text.kept import TOKENIZERS
from stem_edge.shown import format_size

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
    of: str  # path of the bundle or checkpoint that it belongs to, if one is known
    changed: str  # day

    def __str__(self) -> str:
        """Return a line for people."""
        size = format_size(self.nbytes)
        head = f"{size:>9}  {self.kind:<10} {self.path.name:<36} {self.changed}"
        return f"{head}  {self.of}".rstrip()

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
            of = OWNERS[kind](path) if kind in OWNERS else ""
            changed = str(date.fromtimestamp(path.stat().st_mtime))
            yield Entry(path=path, kind=kind, nbytes=_nbytes(path), of=of, changed=changed)


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


def _source(made: Path) -> str:
    known = Made(made).read()
    return "" if known is None else known.source.path


def _bundle(prepared: Path) -> str:
    record = read_prepared(prepared)
    return "" if record is None else record.bundle


# Kind -> the path of the bundle or checkpoint that an entry belongs to.
OWNERS = {MADE: _source, PREPARED: _bundle, CHECKED: marked_folder}
