"""The command `stem-edge verify`: compare a bundle's files with the checksums in its manifest."""

from __future__ import annotations

import argparse
import json

from stem_edge.bundle.checksums import verify
from stem_edge.bundle.manifest import is_shard, open_manifest
from stem_edge.bundle.opening import bundle_folder
from stem_edge.commands.options.loading import BUNDLE_HELP, add_loading
from stem_edge.errors import BundleError
from stem_edge.progress import Progress
from stem_edge.shown import format_size, printable

COPY_AGAIN = "copy the bundle again from its source or export it again"
DESCRIPTION = """\
Compare every file of a bundle with the size and sha256 that its manifest lists.
Print a line for each file that is not as exported, or one line if all are. Every
load makes all other checks itself, such as whether the weights fit the model.
With --tables, the shards of the tables are left out: hash them where they are.

The exit status is 0 if all is right, and 1 if not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help=BUNDLE_HELP)
    add_loading(parser, "tables")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    shards = args.tables is None
    root = bundle_folder(args.bundle, shards=shards)
    entries = open_manifest(root).files
    nbytes = sum(entry.nbytes for name, entry in entries.items() if shards or not is_shard(name))
    with Progress(nbytes, "verifying", None) as bar:
        files = verify(root, bar.advance, shards=shards)
    wrong = [printable(f"{name}: {found}") for name, found in files.items() if found != "ok"]
    if args.json:
        print(json.dumps({"ok": not wrong, "files": files}, indent=1))
        return 1 if wrong else 0
    if wrong:
        print(*wrong, sep="\n")
        counts = f"{len(wrong)} of {len(files)} files are not as exported"
        raise BundleError(f"{args.bundle}: {counts}; {COPY_AGAIN}")
    without = ", without the shards of the tables" * (len(files) < len(entries))
    print(f"{args.bundle}: {len(files)} files, {format_size(nbytes)}, as exported{without}")
    return 0
