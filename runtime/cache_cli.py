"""The command `stem-edge cache`: what is kept in the user's cache folder."""

from __future__ import annotations

import argparse
import json

import msgspec
import onnxruntime as ort

from stem_edge.errors import StemEdgeError
from stem_edge.runtime.user_cache import Entry, cache_folder, entries, remove
from stem_edge.units import format_size

DESCRIPTION = """\
List what stem-edge keeps in the user's cache folder: backbones prepared for this processor, counts
of used tokens, which warm the row cache, verdicts on the ggml that is installed, and on bundles that
were tried before they were loaded. Everything there can be removed: what is needed is made again.
Old is what another onnxruntime, ggml or processor made, what is damaged, and what belongs to a
bundle or library that is gone or has changed."""

EPILOG = """\
examples:
  stem-edge cache
  stem-edge cache --remove old
  stem-edge cache --remove all"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See stem_edge.cli.Command."""
    parser.epilog = EPILOG
    parser.add_argument("--remove", choices=("old", "all"), help="delete old entries, or all")
    parser.add_argument("--cache-dir", metavar="DIR", help="instead of the user's cache folder")
    parser.add_argument("--json", action="store_true", help="print the entries as JSON")


def run(args: argparse.Namespace) -> int:
    """See stem_edge.cli.Command."""
    folder = cache_folder(args.cache_dir)
    found = list(entries(folder, ort.__version__))
    chosen = [e for e in found if args.remove == "all" or (args.remove == "old" and e.stale)]
    for entry in chosen:
        try:
            remove(entry)
        except OSError as error:
            raise StemEdgeError(f"{entry.path}: cannot remove ({error.strerror})") from error
    if args.json:
        listed = [_plain(entry) | {"removed": entry in chosen} for entry in found]
        print(json.dumps({"folder": str(folder), "entries": listed}, indent=1))
        return 0
    print(f"{folder}: {format_size(sum(e.nbytes for e in found))} in {len(found)} entries")
    for entry in found:
        state = "removed" if entry in chosen else f"old: {entry.stale}" if entry.stale else ""
        size = format_size(entry.nbytes)
        print(f"{size:>9}  {entry.kind:<9} {entry.path.name:<36} {entry.of} {state}".rstrip())
    if args.remove and not chosen:
        print("nothing removed" + (": no entry is old" if found else ""))
    elif any(entry.stale for entry in found) and not chosen:
        print("remove what is old with: stem-edge cache --remove old")
    return 0


def _plain(entry: Entry) -> dict[str, object]:
    return dict(msgspec.to_builtins(entry, enc_hook=str))
