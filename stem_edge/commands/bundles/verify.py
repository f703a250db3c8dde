"""The command `stem-edge verify`: check whether a bundle is safe to load."""

from __future__ import annotations

import argparse
import json

from stem_edge.commands.options.loading import BUNDLE_HELP, add_loading
from stem_edge.errors import BundleError
from stem_edge.runtime.first_load.safety import check_safety
from stem_edge.shown import printable

COPY_AGAIN = "copy the bundle again from its source or export it again"
DESCRIPTION = """\
Check if a bundle is safe to load. Print one line: that it is, or why it is not.
Every file must have the size and sha256 that the manifest lists; the weights and
tables must have the size that follows from the model; the tokenizer must be of
the kinds that stem-edge writes; and the chat template must work in a process of
its own, within limits of memory and time. Safe means that no damage was found.
It is no proof, and says nothing about what the model writes.
With --tables, the shards of the tables are left out: hash them where they are.

The exit status is 0 if all is right, and 1 if not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help=BUNDLE_HELP)
    add_loading(parser, "tables")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    found = check_safety(args.bundle, tables=args.tables)
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
    raise BundleError(f"{args.bundle}: not safe to load: {first}{more}; {COPY_AGAIN}")
