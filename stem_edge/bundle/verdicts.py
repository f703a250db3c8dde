"""Verdicts of trials of bundles, kept in the user's cache folder so that each is tried once.

A verdict is about contents: the manifest, which names every file's sha256, and their readers on
this machine: engine, tokenizers, stem-edge, processor. It is good, or bad with a reason. A place
says that the files at a path had the checksums of that manifest, and counts until one of them is
replaced or written to. So a bundle with a known place and verdict is loaded at once, a copy of
it is hashed once, and other contents are tried (stem_edge.runtime.first_load.trial).

A trial that ran out of time may only mean a busy machine, so its verdict counts for an hour. Losing
any of these files costs another trial, no more.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import msgspec

from stem_edge import __version__
from stem_edge.bundle.manifest import (
    BACKBONES,
    MANIFEST,
    MAX_MANIFEST_NBYTES,
    TABLES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    digest,
    is_shard,
    version_of,
)
from stem_edge.bundle.opening import Bundle
from stem_edge.files import disk
from stem_edge.files.plain_files import damaged
from stem_edge.graph.formats import EngineName
from stem_edge.system.user_folder import cache_folder, cpu_digest

FORMAT = 3
TRIALS, PLACES = "trials", "places"  # folders
MAX_NBYTES = 1 << 16
DOUBT_SECONDS = 3600  # that an uncertain verdict counts
HASHED_TABLES_NBYTES = 1 << 30  # takes a second or two; larger ones are left to `verify`


class Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Result of a trial, as it is kept; the name of the file says of what."""

    format: int
    bundle: str  # its path at the time
    engine: EngineName
    reason: str = ""  # why it is bad; empty: it is good
    until: int | None = None  # seconds since 1970; None: for ever
    # Divergence of the prefill graph from the decoding graph here, in nats; None: not measured.
    prefill_from_decode: float | None = None

    @property
    def counts(self) -> bool:
        """True if it still holds; it also ends when the clock was set back."""
        return self.until is None or 0 <= self.until - time.time() <= DOUBT_SECONDS


class Verdicts:
    """What is kept about a bundle on an engine. Raises BundleError if it cannot be read."""

    def __init__(self, bundle: Bundle, engine: EngineName, cache_dir: str | Path | None) -> None:
        self.bundle, self.engine = bundle, engine
        root = cache_folder(cache_dir)
        try:
            data = disk.read_file(bundle.file(MANIFEST), MAX_MANIFEST_NBYTES)
            stats = [
                (name, disk.status(bundle.file(name))) for name in (MANIFEST, *self.hashed_files())
            ]
        except OSError as error:
            raise damaged(bundle.path, f"cannot read ({error.strerror})") from error
        sha256 = hashlib.sha256(data).hexdigest()
        files = [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in stats]
        # Escaped, because names that are not UTF-8 cannot be encoded.
        self.path = os.fsencode(bundle.path.resolve()).decode(errors="backslashreplace")
        self.verdict_file = root / TRIALS / _name(sha256, engine, versions(engine), cpu_digest())
        self.place_file = root / PLACES / _name(sha256, engine, self.path, files)

    def native_files(self) -> list[str]:
        """Names of the files that native code reads as they are."""
        manifest = self.bundle.manifest
        native = [name for name in BACKBONES[self.engine].native if name in manifest.files]
        return [TOKENIZER, TOKENIZER_CONFIG, *native]

    def hashed_files(self) -> list[str]:
        """Names of the files to hash: native ones and small tables.

        Checksums of records are no substitute, because they do not say where the records belong.
        """
        files = self.bundle.manifest.files
        tables = [name for name in files if name.startswith(f"{TABLES}/")]
        if self.bundle.tables is not None:
            tables = [name for name in tables if not is_shard(name)]
        small = sum(files[name].nbytes for name in tables) <= HASHED_TABLES_NBYTES
        return self.native_files() + (tables if small else [])

    def nbytes(self, names: list[str]) -> int:
        """Bytes of some of the bundle's files."""
        return sum(self.bundle.manifest.files[name].nbytes for name in names)

    def verdict(self) -> Verdict | None:
        """Return the verdict that counts, if there is one."""
        found = read_verdict(self.verdict_file)
        return found if found is not None and found.counts else None

    def good(self) -> Verdict | None:
        """Return the good verdict on these very files, if that is known."""
        found = self.verdict() if self.place_is_known() else None
        return None if found is None or found.reason else found

    def place_is_known(self) -> bool:
        """Return whether these files were hashed before."""
        return read_verdict(self.place_file) is not None


def versions(engine: EngineName) -> dict[str, str]:
    """Versions of what reads a bundle here; empty for what is not installed."""
    found = {"stem-edge": __version__, "tokenizers": version_of("tokenizers")}
    return found | {engine: BACKBONES[engine].library()}


def read_verdict(path: Path) -> Verdict | None:
    """Read a verdict; None if it is missing, damaged or of another format."""
    try:
        kept = msgspec.json.decode(disk.read_file(path, MAX_NBYTES), type=Verdict)
    except (OSError, ValueError, RecursionError):  # msgspec raises ValueError
        return None
    return kept if kept.format == FORMAT else None


def _name(*parts: object) -> str:
    return f"{digest(FORMAT, *parts)}.json"
