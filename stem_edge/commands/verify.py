"""The command `stem-edge verify`."""

from __future__ import annotations

import argparse
import json

import stem_edge
from stem_edge.errors import BundleError, StemEdgeError
from stem_edge.progress import show_status
from stem_edge.text_table import printable

DESCRIPTION = """\
Say in one line whether a bundle is safe to load, and why: every file has the size and sha256 that
the manifest lists, and nothing beside them can be run; weights are as many bytes as the model has;
every record of the tables and the tokenizer are of the kinds that stem-edge writes; and a process of
its own, with limits of memory and time, loads the tokenizer. Safe means that no damage, no code, no
crash and no hang was found here; it is no proof, and says nothing about what the model writes.
With --runs, generate instead with every size of cache, way of reading and way of loading, on every
engine that is installed: on one engine, they must not change a single token.
Exit status 0 if all is right, 1 if not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See stem_edge.commands.main.Command."""
    parser.add_argument("bundle", metavar="BUNDLE", help="folder that stem-edge export wrote")
    parser.add_argument("--runs", action="store_true", help="compare tokens instead")
    parser.add_argument("--cache-dir", metavar="DIR", help="instead of the user's cache folder")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """See stem_edge.commands.main.Command."""
    return _verify_runs(args) if args.runs else _verify_files(args)


def _verify_runs(args: argparse.Namespace) -> int:
    results = stem_edge.verify_runs(
        args.bundle, cache_dir=args.cache_dir, progress=lambda name: show_status(f"running: {name}")
    )
    show_status("")
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
    found = stem_edge.check_safety(args.bundle, cache_dir=args.cache_dir)
    if args.json:
        plain = {name: getattr(found, name) for name in ("reasons", "checked", "files")}
        print(json.dumps({"ok": found.safe, "safe": found.safe} | plain, indent=1))
        return 0 if found.safe else 1
    if found.safe:
        print(f"{args.bundle}: safe to load: {', '.join(found.checked)}")
        return 0
    first, *others = found.reasons
    for reason in others:
        print(printable(reason))
    first = printable(first.partition("; ")[0])
    more = f" (and {len(others)} more, above)" if others else ""
    raise BundleError(f"{args.bundle}: not safe to load: {first}{more}; {found.advice}")
