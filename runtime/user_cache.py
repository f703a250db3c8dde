"""What stem-edge keeps in the user's cache folder: prepared backbones, token counts, verdicts.

    prepared/<key>/    prepared.json and the graphs, rearranged for one processor and onnxruntime
    counts/<key>.npy   how often each token was used with one bundle
    ggml/<key>.json    that a library of ggml computes what it should (stem_edge.ggml_check)
    trials/<key>.json  whether a bundle loads (stem_edge.verdicts)
    places/<key>.json  that the files at a path are those of a bundle's manifest

Everything here can be deleted at any time: it is made again, or done without.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from stem_edge import disk, ggml_check
from stem_edge.bundle import MANIFEST, MAX_MANIFEST_NBYTES, Bundle, open_bundle
from stem_edge.errors import BundleError
from stem_edge.graph.decode import BACKBONE_DATA, PREFILL_DATA
from stem_edge.plain_files import read_plain
from stem_edge.runtime.graphs import cpu_graphs
from stem_edge.user_folder import KEY_CHARS, cache_folder, cpu_digest
from stem_edge.verdicts import PLACES, TRIALS, Records, read_verdict

__all__ = [  # with what the rest of the runtime expects here
    "FORMAT",
    "RECORD",
    "Entry",
    "Prepared",
    "cache_folder",
    "counts_file",
    "cpu_digest",
    "entries",
    "prepared_folder",
    "read_prepared",
    "remove",
    "temporary_folder",
]

FORMAT = 4
PREPARED, COUNTS = "prepared", "counts"
RECORD = "prepared.json"
TEMPORARY = ".making-"  # of a prepared backbone that is being made, or was when it was killed
MAX_RECORD_NBYTES = 1 << 20
Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Prepared(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Contents of prepared.json."""

    format: int
    bundle: str  # path of the bundle it was made from
    onnxruntime: str
    cpu: str  # digest of the processor's features
    files: dict[str, tuple[Size, int]]  # size, and time of change in ns: what changed is not ours
    prefill: bool | None  # whether the prefill graph is the faster one; None: there is none
    seconds: dict[str, float]  # graph -> time of a prompt chunk, as measured
    refused: str = ""  # why nothing was prepared, and would not be the next time, either


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One thing in the cache folder, as `stem-edge cache` lists it."""

    path: Path
    kind: str
    nbytes: int
    of: str  # what it belongs to
    stale: str  # why nothing will use it again; empty if it may be used


def prepared_folder(root: Path, bundle: Bundle, onnxruntime: str) -> Path:
    """Where the prepared backbone of this bundle, processor and onnxruntime is, once it is made."""
    files = bundle.manifest.files
    weights = [files[name].sha256 for name in (BACKBONE_DATA, PREFILL_DATA) if name in files]
    graphs = [
        graph.data for graph in cpu_graphs(bundle, prefill=bundle.manifest.has_prefill).values()
    ]
    built = hashlib.sha256(b"".join(graphs)).hexdigest()
    described = repr((FORMAT, onnxruntime, cpu_digest(), weights, built))
    return root / PREPARED / hashlib.sha256(described.encode()).hexdigest()[:KEY_CHARS]


def counts_file(root: Path, bundle: Bundle) -> Path:
    """Where the token counts of this bundle are kept."""
    digest = hashlib.sha256(read_plain(bundle.file(MANIFEST), MAX_MANIFEST_NBYTES, "manifest"))
    return root / COUNTS / f"{digest.hexdigest()[:KEY_CHARS]}.npy"


def read_prepared(folder: Path) -> Prepared | None:
    """The record of a prepared backbone; None if it is missing, damaged or of another format."""
    try:
        data = disk.read_file(folder / RECORD, MAX_RECORD_NBYTES)
        record = msgspec.json.decode(data, type=Prepared)
        found = {name: marks(folder / name) for name in record.files}
    except (OSError, ValueError, msgspec.DecodeError, RecursionError):
        return None
    plain = all(Path(name).name == name for name in record.files)
    return record if record.format == FORMAT and plain and found == record.files else None


def marks(path: Path) -> tuple[int, int]:
    """Size and time of change of a file. Raises OSError."""
    status = path.lstat()
    return status.st_size, status.st_mtime_ns


def entries(root: Path, onnxruntime: str) -> Iterator[Entry]:
    """Everything in the cache folder."""
    for folder in sorted((root / PREPARED).glob("*")):
        nbytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        record = read_prepared(folder)
        if folder.name.startswith(TEMPORARY):
            of, stale = "", "" if _is_alive(folder) else "was not finished"
        elif record is None:
            of, stale = "", "damaged"
        else:
            of, stale = record.bundle, _stale(record, onnxruntime)
            of += ", refused" if record.refused else ""
        yield Entry(path=folder, kind=PREPARED, nbytes=nbytes, of=of, stale=stale)
    for path in sorted((root / COUNTS).glob("*.npy")):
        yield Entry(path=path, kind=COUNTS, nbytes=path.stat().st_size, of="", stale="")
    judged = {ggml_check.FOLDER: _library, TRIALS: _bundle, PLACES: _bundle}
    for kind, judge in judged.items():
        for path in sorted((root / kind).glob("*")):
            of, stale = judge(root, path)
            yield Entry(path=path, kind=kind, nbytes=path.stat().st_size, of=of, stale=stale)


def temporary_folder(root: Path) -> Path:
    """A new folder for a prepared backbone of this process to grow in. Raises OSError."""
    folder = root / PREPARED / f"{TEMPORARY}{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def remove(entry: Entry) -> None:
    """Delete it. Raises OSError."""
    if entry.path.is_dir():
        shutil.rmtree(entry.path)
    else:
        entry.path.unlink()


def _stale(record: Prepared, onnxruntime: str) -> str:
    if record.onnxruntime != onnxruntime:
        return f"made by onnxruntime {record.onnxruntime}"
    if record.cpu != cpu_digest():
        return "made for another processor"
    return "" if Path(record.bundle).is_dir() else "its bundle is gone"


def _library(root: Path, path: Path) -> tuple[str, str]:
    """The library that a verdict is about, and why it does not count, if so."""
    verdict = ggml_check.read_verdict(path)
    if verdict is None:
        return "", "damaged"
    try:
        current = ggml_check.verdict_file(root, Path(verdict.library)) == path
    except OSError:
        return verdict.library, "its library is gone"
    return verdict.library, "" if current else "of another library, processor or stem-edge"


def _bundle(root: Path, path: Path) -> tuple[str, str]:
    """The same for a bundle that was tried, or whose files were hashed."""
    verdict = read_verdict(path)
    if verdict is None:
        return "", "damaged"
    of = f"{verdict.bundle} on {verdict.engine}" + (", bad" if verdict.reason else "")
    try:
        records = Records(open_bundle(verdict.bundle), verdict.engine, root)
    except BundleError:
        return of, "its bundle is gone or damaged"
    if path in (records.verdict_file, records.place_file):
        return of, ""
    return of, f"of another bundle there, {verdict.engine}, tokenizers, stem-edge or processor"


def _is_alive(folder: Path) -> bool:
    """Whether the process that makes it still runs; where that is hard to say, it may."""
    number = folder.name.removeprefix(TEMPORARY)
    if os.name != "posix" or not number.isdigit():
        return os.name != "posix"
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
