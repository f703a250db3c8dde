"""The command `stem-edge verify`."""

from __future__ import annotations

import argparse
import json
import sys

import stem_edge
from stem_edge.bundle import open_manifest
from stem_edge.checksums import verify
from stem_edge.errors import BundleError, StemEdgeError
from stem_edge.progress import Progress
from stem_edge.units import format_size

DESCRIPTION = """\
Compare every file of a bundle with the size and sha256 that its manifest lists.
With --runs, generate instead with every size of cache, way of reading and way of loading, on every
engine that is installed: on one engine, they must not change a single token.
Exit status 0 if all are right, 1 if not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See stem_edge.cli.Command."""
    parser.add_argument("bundle", metavar="BUNDLE", help="folder that stem-edge export wrote")
    parser.add_argument("--runs", action="store_true", help="compare tokens instead of files")
    parser.add_argument("--cache-dir", metavar="DIR", help="instead of the user's cache folder")
    parser.add_argument("--json", action="store_true", help="print file -> result as JSON")


def run(args: argparse.Namespace) -> int:
    """See stem_edge.cli.Command."""
    return _verify_runs(args) if args.runs else _verify_files(args)


def _verify_runs(args: argparse.Namespace) -> int:
    def say(name: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[Krunning: {name}", end="", file=sys.stderr, flush=True)

    results = stem_edge.verify_runs(args.bundle, cache_dir=args.cache_dir, progress=say)
    say("done\n")
    ran = {name: result for name, result in results.items() if not result.startswith("not run")}
    wrong = [name for name, result in ran.items() if result != "ok"]
    if args.json:
        print(json.dumps({"ok": not wrong, "runs": results}, indent=1))
        return 1 if wrong else 0
    for name, result in results.items():
        print(f"{name:<44}{result}")
    if wrong:
        raise StemEdgeError(
            f"{args.bundle}: {len(wrong)} of {len(ran)} ways of running it give other tokens; "
            "run stem-edge verify, then report this with the output above"
        )
    return 0


def _verify_files(args: argparse.Namespace) -> int:
    entries = open_manifest(args.bundle).files
    total = sum(entry.nbytes for entry in entries.values())
    with Progress(total, "verifying", None) as bar:
        results = verify(args.bundle, bar.advance)
    wrong = {name: result for name, result in results.items() if result != "ok"}
    if args.json:
        print(json.dumps({"ok": not wrong, "files": results}, indent=1))
    elif not wrong:
        print(f"{args.bundle}: {len(results)} files, {format_size(total)}, all as exported")
    else:
        for name, result in wrong.items():
            print(f"{printable(name)}: {result}")
        raise BundleError(
            f"{args.bundle}: {len(wrong)} of {len(results)} files differ; "
            "copy the bundle again from its source or export it again"
        )
    return 1 if wrong else 0


def printable(name: str) -> str:
    """A file name that does nothing to a terminal: names in a folder may hold any bytes."""
    return name if name.isprintable() else ascii(name)
