"""What trials of bundles found, kept in the user's cache folder so that each is tried once.

A verdict is about contents: the manifest, which names every file's sha256, and all that reads them
here: engine, tokenizers, stem-edge, processor. It is good, or bad with its reason. A place says
that the files at one path had the checksums of that manifest, and counts until one of them is
another file or was written since. So a bundle whose place and verdict are known is loaded at once;
a copy of it is hashed once; other contents are tried (stem_edge.runtime.first_load.trial).

A trial that did not end in time says as much about a busy machine; its verdict counts for an hour.
Losing any of this costs another trial, no more.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from stem_edge import __version__
from stem_edge.bundle.checksums import sha256_of
from stem_edge.bundle.manifest import (
    GGUF,
    MANIFEST,
    MAX_MANIFEST_NBYTES,
    TABLES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    Bundle,
)
from stem_edge.errors import BundleError
from stem_edge.files import disk
from stem_edge.files.whole_file import write_whole
from stem_edge.ggml.check import library_files
from stem_edge.ggml.library import library_path
from stem_edge.graph.decode import BACKBONE_DATA, PREFILL_DATA
from stem_edge.graph.formats import EngineName
from stem_edge.system.user_folder import KEY_CHARS, cache_folder, cpu_digest

FORMAT = 3
TRIALS, PLACES = "trials", "places"  # folders
MAX_NBYTES = 1 << 16
DOUBT_SECONDS = 3600  # that a verdict counts which is not certain
HASHED_TABLES_NBYTES = 1 << 30  # a second or two; above, only `verify` hashes them


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was found, as it is kept; the file's name says about what."""

    format: int
    bundle: str  # where it was then
    engine: EngineName
    reason: str = ""  # why it is bad; empty if it is good
    until: int | None = None  # seconds since 1970, if it is not certain
    # How far the prefill graph diverges here from those that decode, in nats; None: not measured.
    prefill_from_decode: float | None = None

    @property
    def counts(self) -> bool:
        """Whether it does now; a clock that was set back ends it, too."""
        return self.until is None or 0 <= self.until - time.time() <= DOUBT_SECONDS


class Records:
    """What is kept about one bundle on one engine. Raises BundleError if it cannot be read."""

    def __init__(self, bundle: Bundle, engine: EngineName, cache_dir: str | Path | None) -> None:
        self.bundle, self.engine = bundle, engine
        root = cache_folder(cache_dir)
        try:
            data = disk.read_file(bundle.file(MANIFEST), MAX_MANIFEST_NBYTES)
            stats = [(name, bundle.file(name).lstat()) for name in (MANIFEST, *self.hashed_files())]
        except OSError as error:
            raise BundleError(
                f"{bundle.path}: cannot read ({error.strerror}); copy or export the bundle again"
            ) from error
        sha256 = hashlib.sha256(data).hexdigest()
        files = [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in stats]
        # Names that are no UTF-8 cannot be kept as they are.
        self._path = os.fsencode(bundle.path.resolve()).decode(errors="backslashreplace")
        self.verdict_file = root / TRIALS / _name(sha256, engine, versions(engine), cpu_digest())
        self.place_file = root / PLACES / _name(sha256, engine, self._path, files)

    def native_files(self) -> list[str]:
        """Files that go to native code as they are."""
        manifest = self.bundle.manifest
        names = [TOKENIZER, TOKENIZER_CONFIG]
        if self.engine == "ggml":
            return [*names, GGUF]
        return names + [name for name in (BACKBONE_DATA, PREFILL_DATA) if name in manifest.files]

    def hashed_files(self) -> list[str]:
        """These, and tables that are small: checksums of records do not say whose records they are."""
        files = self.bundle.manifest.files
        tables = [name for name in files if name.startswith(f"{TABLES}/")]
        small = sum(files[name].nbytes for name in tables) <= HASHED_TABLES_NBYTES
        return self.native_files() + (tables if small else [])

    def nbytes(self, names: list[str]) -> int:
        """Bytes of some of the bundle's files."""
        return sum(self.bundle.manifest.files[name].nbytes for name in names)

    def verdict(self) -> Verdict | None:
        """The verdict that counts, if there is one."""
        found = read_verdict(self.verdict_file)
        return found if found is not None and found.counts else None

    def place_is_known(self) -> bool:
        """Whether these files were hashed before."""
        return read_verdict(self.place_file) is not None

    def keep_verdict(
        self,
        reason: str = "",
        *,
        certain: bool = True,
        prefill_from_decode: float | None = None,
    ) -> Verdict:
        """Good, or bad for a reason. A folder that cannot be written keeps nothing."""
        until = None if certain else int(time.time()) + DOUBT_SECONDS
        found = {"reason": reason, "until": until, "prefill_from_decode": prefill_from_decode}
        return self._keep(self.verdict_file, found)

    def check_place(
        self, progress: Callable[[int], object] = lambda nbytes: None, *, anew: bool = False
    ) -> None:
        """Hash the files, if that was not done before. Raises BundleError, which names the one that differs.

        progress: is called with the number of bytes just hashed.
        """
        if self.place_is_known() and not anew:
            return
        for name in self.hashed_files():
            path, entry = self.bundle.file(name), self.bundle.manifest.files[name]
            found = sha256_of(path, entry.nbytes, progress)
            if found != entry.sha256:
                raise BundleError(
                    f"{path}: sha256 is {found}, expected {entry.sha256}; the file is damaged: copy "
                    "or export the bundle again"
                )
        self._keep(self.place_file, {})

    def _keep(self, path: Path, found: dict[str, Any]) -> Verdict:
        """Whole or not at all; without it there is another trial next time."""
        verdict = Verdict(format=FORMAT, bundle=self._path, engine=self.engine, **found)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, msgspec.json.encode(verdict))
        return verdict


def keep_good(bundle: Bundle, engine: EngineName, cache_dir: str | Path | None = None) -> None:
    """Keep a good verdict on a bundle that has just been run in this process."""
    measured = bundle.manifest.reports[engine].prefill_from_decode
    with contextlib.suppress(BundleError):
        Records(bundle, engine, cache_dir).keep_verdict(prefill_from_decode=measured)


def versions(engine: EngineName) -> dict[str, str]:
    """What native code would read a bundle now; what is not installed has no version."""
    found = {"stem-edge": __version__, "tokenizers": _version("tokenizers")}
    if engine == "onnxruntime":
        return found | {"onnxruntime": _version("onnxruntime")}
    library = library_path()
    with contextlib.suppress(OSError):
        if library is not None:
            return found | {"ggml": _digest(*library_files(library))}
    return found | {"ggml": ""}


def read_verdict(path: Path) -> Verdict | None:
    """A verdict that was kept; None if there is none, or it is damaged or of another format."""
    try:
        kept = msgspec.json.decode(disk.read_file(path, MAX_NBYTES), type=Verdict)
    except (OSError, ValueError, RecursionError):  # msgspec's are ValueErrors
        return None
    return kept if kept.format == FORMAT else None


def _version(module: str) -> str:
    # Imported by name: whoever asks is about to use it, and importing this file shall cost nothing.
    try:
        return str(import_module(module).__version__)
    except ModuleNotFoundError:  # not ImportError: that is also what an interrupted import raises
        return ""


def _name(*parts: object) -> str:
    return f"{_digest(FORMAT, *parts)}.json"


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:KEY_CHARS]
