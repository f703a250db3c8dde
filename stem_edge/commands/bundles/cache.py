"""The command `stem-edge cache`: list and remove files in the user's cache folder.

    made/<key>/        bundle of a checkpoint that was loaded as it is (stem_edge.runtime.first_load.made)
    prepared/<key>/    prepared.json and graphs rearranged for one processor and onnxruntime
    counts/<key>.npy   how often each token was used with one bundle
    graphs/<key>-<key>  graphs as they were built (stem_edge.runtime.backends.onnxruntime.prepared.kept_graphs)
    tokenizers/<key>-<key>  tokenizer as it was checked, read by parts (stem_edge.runtime.text.kept)
    tier/<key>.rows    records of tables that are elsewhere, and in <key>.map what it holds
    ggml/<key>.json    verdict: this library of ggml computes what it should (stem_edge.ggml.check)
    trials/<key>.json  verdict: this bundle loads, or why it does not (stem_edge.bundle.verdicts)
    checked/<key>      mark: the files of a model on a hub have the right hashes (stem_edge.bundle.fetched)
    places/<key>.json  verdict: the files at this path are those of the bundle's manifest
    prefixes/<key>-<key>.safetensors  keys and values of a prompt (runtime/prefixes)

Everything there can be deleted at any time: it is made again when it is needed.
"""

from __future__ import annotations

import argparse
import json
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
from stem_edge.bundle.opening import open_bundle
from stem_edge.bundle.verdicts import PLACES, TRIALS, Verdicts, read_verdict
from stem_edge.commands.options.loading import add_loading
from stem_edge.errors import BundleError, InputError, StemEdgeError
from stem_edge.files.trees import remove_tree
from stem_edge.ggml import check as ggml_check
from stem_edge.graph.kv import KV_TYPES, OnnxCaches
from stem_edge.hub.kept import KEY, MADE
from stem_edge.runtime.backends.onnxruntime.prepared import prepacked as prepared
from stem_edge.runtime.backends.onnxruntime.prepared.folder import TEMPORARY, is_left
from stem_edge.runtime.backends.onnxruntime.prepared.kept_graphs import GRAPHS, builders
from stem_edge.runtime.backends.onnxruntime.prepared.looking import FOLDER
from stem_edge.runtime.backends.onnxruntime.providers.graphs import format_of
from stem_edge.runtime.first_load.made import RECORD, Made
from stem_edge.runtime.prefixes.file import PREFIX_NAME, TEMPORARY_NAME, PrefixFile
from stem_edge.runtime.prefixes.folder import FOLDER as PREFIXES
from stem_edge.runtime.prefixes.folder import is_unfinished
from stem_edge.runtime.rows.disk_tier import TIER
from stem_edge.runtime.rows.warm import COUNTS
from stem_edge.runtime.text.kept import TOKENIZERS, readers
from stem_edge.shown import printable
from stem_edge.system.user_folder import KEY_CHARS, cache_folder, cpu_digest
from stem_edge.units import format_size

DESCRIPTION = """\
List what stem-edge keeps in the user's cache folder: bundles made of checkpoints that were loaded
as they are, backbones prepared for this processor, graphs, checked tokenizers, counts of used
tokens, which warm the row cache, verdicts on installed versions of ggml and on bundles that were
tried before they were loaded, marks of models from hubs with the right hashes, and prompts
(--prompt-cache without DIR). All of it can be removed: what is needed is made again. Prompts in a
DIR and saved conversations are not listed.

An entry is old if another stem-edge, onnxruntime, tokenizers, ggml or processor made it, if it is
damaged, or if its bundle, library or checkpoint is gone or has changed. What a process uses stays."""

EPILOG = """\
examples:
  stem-edge cache
  stem-edge cache --remove old
  stem-edge cache --remove 6f8dcde149d0
  stem-edge cache --remove all"""

_KEY = rf"[0-9a-f]{{{KEY_CHARS}}}"
# Kind of entry, and name of its folder in the cache folder -> names that stem-edge gives there.
OURS = {
    MADE: KEY,
    FOLDER: re.compile(rf"{_KEY}|{re.escape(TEMPORARY)}(left|\d+)-{_KEY}-[0-9a-f]{{8}}"),
    COUNTS: re.compile(rf"{_KEY}\.npy"),
    TIER: re.compile(rf"{_KEY}\.(rows|map)"),
    PREFIXES: re.compile(f"{PREFIX_NAME.pattern}|{TEMPORARY_NAME.pattern}"),
    **dict.fromkeys((TOKENIZERS, GRAPHS), re.compile(f"{_KEY}-{_KEY}")),
    CHECKED: re.compile(_KEY),
    **dict.fromkeys((ggml_check.FOLDER, TRIALS, PLACES), re.compile(rf"{_KEY}\.json")),
}


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Entry of the cache folder, as `stem-edge cache` lists it."""

    path: Path
    kind: str
    nbytes: int
    of: str  # path of the bundle, library or checkpoint that it belongs to
    stale: str  # why it will not be used again; empty if it may be used
    used: str = ""  # last day of use; empty where none is known

    def remove(self) -> bool:
        """Delete it; False if a process uses it. Raises OSError."""
        if self.kind == MADE:
            return Made(self.path).remove()
        if self.kind == FOLDER:
            return remove_tree(self.path, self.path.parent)
        self.path.unlink()
        return True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "remove old entries, all, or those of this name or of this bundle, library or checkpoint"
    parser.add_argument("--remove", metavar="old|all|NAME", help=what)
    add_loading(parser, "cache_dir")
    parser.add_argument("--json", action="store_true", help="print the entries as JSON")


def run(args: argparse.Namespace) -> int:
    folder = cache_folder(args.cache_dir)
    found = list(entries(folder))
    chosen = _chosen(found, args.remove)
    removed = remove_entries(chosen)
    if args.json:
        listed = [
            msgspec.to_builtins(entry, enc_hook=str) | {"removed": entry in removed}
            for entry in found
        ]
        print(json.dumps({"folder": str(folder), "entries": listed}, indent=1))
    else:
        print(f"{folder}: {format_size(sum(e.nbytes for e in found))} in {len(found)} entries")
        for entry in found:
            print(_line(entry, entry in removed, entry in chosen))
        if args.remove and not chosen:
            print("nothing removed" + (": no entry is old" if found else ""))
        elif any(entry.stale for entry in found) and not chosen:
            print("to remove old entries: stem-edge cache --remove old")
    return 0 if len(removed) == len(chosen) else 1


def _chosen(found: list[Entry], remove: str | None) -> list[Entry]:
    """Return the entries to remove. Raises InputError for a name that none has."""
    if remove in (None, "old", "all"):
        return [e for e in found if remove == "all" or (remove == "old" and e.stale)]
    if not remove:
        raise InputError("no entry has an empty name; stem-edge cache lists them")
    named = (remove, str(Path(remove).resolve()))
    chosen = [e for e in found if e.path.name in named or e.of in named]
    if not chosen:
        raise InputError(f"no entry is called {remove!r}; stem-edge cache lists them")
    made = [e for entry in chosen for e in belonging(found, entry.path) if e != entry]
    return chosen + made  # what was made for the bundle in it


def belonging(found: list[Entry], folder: Path) -> list[Entry]:
    """Return the entries that are in a folder, or were made for what is in it."""
    within = f"{folder.resolve()}{os.sep}"
    return [e for e in found if f"{e.path.resolve()}{os.sep}" == within or e.of.startswith(within)]


def remove_entries(chosen: list[Entry]) -> list[Entry]:
    """Delete entries; return those that no process uses. Raises StemEdgeError."""
    return [entry for entry in chosen if _remove(entry)]


def _remove(entry: Entry) -> bool:
    try:
        return entry.remove()
    except OSError as error:
        raise StemEdgeError(f"{entry.path}: cannot remove ({error.strerror})") from error


def _line(entry: Entry, removed: bool, chosen: bool) -> str:
    state = "removed" if removed else f"old: {entry.stale}" if entry.stale else ""
    state = "in use, not removed" if chosen and not removed else state
    used = f"used {entry.used}" if entry.used else ""
    named = f"{format_size(entry.nbytes):>9}  {entry.kind:<9} {entry.path.name:<36}"
    return printable(" ".join(part for part in (named, entry.of, used, state) if part).rstrip())


def entries(root: Path) -> Iterator[Entry]:
    """Yield everything in the cache folder, kind by kind."""
    yield from _made(root)
    for folder in _ours(root, FOLDER):
        nbytes = _nbytes(folder)
        record = prepared.read_prepared(folder)
        if folder.name.startswith(TEMPORARY):
            of, stale = "", "was not finished" if is_left(folder) else ""
        elif record is None:
            of, stale = "", "damaged"
        else:
            of, stale = record.bundle, _stale(folder, record)
            of += ", refused" if record.refused else ""
        yield Entry(path=folder, kind=FOLDER, nbytes=nbytes, of=of, stale=stale)
    for kind in (COUNTS, TIER):
        for path in _ours(root, kind):
            yield Entry(path=path, kind=kind, nbytes=_nbytes(path), of="", stale="")
    for kind, makers in ((TOKENIZERS, readers()), (GRAPHS, builders())):
        for path in _ours(root, kind):
            stale = (
                "" if path.name.startswith(makers) else "made by another stem-edge or tokenizers"
            )
            yield Entry(path=path, kind=kind, nbytes=_nbytes(path), of="", stale=stale)
    judged = {ggml_check.FOLDER: _library, TRIALS: _bundle, PLACES: _bundle}
    for kind, judge in judged.items():
        for path in _ours(root, kind):
            of, stale = judge(root, path)
            yield Entry(path=path, kind=kind, nbytes=_nbytes(path), of=of, stale=stale)
    for path in _ours(root, CHECKED):
        of = marked_folder(path)
        stale = "" if of and Path(of).is_dir() else "its model is gone"
        yield Entry(path=path, kind=CHECKED, nbytes=_nbytes(path), of=of, stale=stale)
    yield from _prefixes(root)


def _ours(root: Path, kind: str) -> list[Path]:
    """Return the files, or folders, of a kind whose names stem-edge gives.

    Anything else belongs to somebody else: --cache-dir may name any folder, and links lead elsewhere.
    """
    names = OURS[kind]
    found = [path for path in (root / kind).glob("*") if names.fullmatch(path.name)]
    folders = kind in (MADE, FOLDER)
    return sorted(
        p for p in found if (p.is_dir() if folders else p.is_file()) and not p.is_symlink()
    )


def _nbytes(place: Path) -> int:
    """Return the bytes of a file, or of a folder's files; another process may delete some meanwhile."""
    nbytes = 0
    for path in (place, *place.rglob("*")):
        with suppress(OSError):
            nbytes += path.lstat().st_size if path.is_file() else 0
    return nbytes


def _made(root: Path) -> Iterator[Entry]:
    for path in _ours(root, MADE):
        nbytes = _nbytes(path)
        made, used, stale = Made(path), "", "was not finished"
        of = "" if (known := made.read()) is None else known.source.path
        if (record := made.record()) is not None:
            with suppress(OSError):
                used = str(date.fromtimestamp((path / RECORD).stat().st_mtime))
            stale = "" if record.is_there else "its checkpoint is gone or has changed"
            stale = stale or ("" if record.version == __version__ else "made by another stem-edge")
        yield Entry(path=path, kind=MADE, nbytes=nbytes, of=of, stale=stale, used=used)


def _prefixes(root: Path) -> Iterator[Entry]:
    for path in _ours(root, PREFIXES):
        of, stale = "", "damaged"
        if TEMPORARY_NAME.fullmatch(path.name):
            with suppress(OSError):
                stale = "was not finished" if is_unfinished(path.stat()) else ""
        else:
            with suppress(ValueError, OSError), PrefixFile(path) as file:
                of = f"{len(file.saved.token_ids)} tokens"
                facts = dict(line.split(": ", 1) for line in file.saved.fingerprint.splitlines())
                here = {"stem-edge": __version__, "processor": cpu_digest()}
                other = [name for name, value in here.items() if facts.get(name) != value]
                stale = f"made for another {other[0]}" if other else ""
        yield Entry(path=path, kind=PREFIXES, nbytes=_nbytes(path), of=of, stale=stale)


def _stale(folder: Path, record: prepared.PreparedRecord) -> str:
    if record.onnxruntime != ort.__version__:
        return f"made by onnxruntime {record.onnxruntime}"
    if record.cpu != cpu_digest():
        return "made for another processor"
    with suppress(StemEdgeError):
        bundle = open_bundle(record.bundle, "")  # also without its shards
        caches = OnnxCaches(format_of(bundle).kv_peaks)
        kinds = [kv for kv in KV_TYPES if not caches.obstacle(kv)]
        root = folder.parent.parent
        current = (prepared.prepared_folder(root, bundle, ort.__version__, kv) for kv in kinds)
        return "" if folder in current else "its bundle has changed"
    return "its bundle is gone or damaged"


def _library(root: Path, path: Path) -> tuple[str, str]:
    """Return the library that a verdict is about, and why the verdict is old (empty: it is not)."""
    verdict = ggml_check.read_verdict(path)
    if verdict is None:
        return "", "damaged"
    try:
        current = ggml_check.verdict_file(root, Path(verdict.library)) == path
    except OSError:
        return verdict.library, "its library is gone"
    return verdict.library, "" if current else "made for another library, processor or stem-edge"


def _bundle(root: Path, path: Path) -> tuple[str, str]:
    """Return the bundle that a verdict is about, and why the verdict is old (empty: it is not)."""
    verdict = read_verdict(path)
    if verdict is None:
        return "", "damaged"
    of = f"{verdict.bundle} on {verdict.engine}" + (", bad" if verdict.reason else "")
    opened = False
    for tables in (None, ""):  # with its shards, and as if they were elsewhere
        with suppress(BundleError):
            records = Verdicts(open_bundle(verdict.bundle, tables), verdict.engine, root)
            opened = True
            if path in (records.verdict_file, records.place_file):
                return of, ""
    if not opened:
        return of, "its bundle is gone or damaged"
    return of, f"made for another bundle, {verdict.engine}, tokenizers, stem-edge or processor"
