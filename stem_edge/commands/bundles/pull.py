"""The command `stem-edge pull`."""

from __future__ import annotations

import argparse
import json

from stem_edge.commands.options.arguments import own_command
from stem_edge.commands.options.loading import add_loading
from stem_edge.hub.kept import kept_bundles
from stem_edge.runtime.backends.options import AUTO, LoadOptions
from stem_edge.runtime.loading import open_or_make
from stem_edge.shown import printable

DESCRIPTION = """\
Fetch a model from a hub, or make a bundle of a checkpoint, and keep it, so that it runs at once by a
short name later. What is there already is not fetched or made again; what was interrupted goes on.
`run`, `generate`, `serve` and others do the same when they are given such a model."""

EPILOG = """\
examples:
  stem-edge pull hf:me/my-model                  a bundle on a hub
  stem-edge pull hf:org/checkpoint               a checkpoint there
  stem-edge pull hf:org/name-GGUF:name.Q4_0.gguf one of its GGUF files
  stem-edge run my-model"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = "hf:org/name, hf:org/name:FILE.gguf, or a checkpoint here (FILE.gguf or a folder)"
    parser.add_argument("model", metavar="MODEL", help=what)
    add_loading(parser, "engine")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    bundle = open_or_make(args.model, LoadOptions(engine=args.engine or AUTO))
    names = {kept.folder.resolve(): kept.name for kept in kept_bundles()}
    name = names.get(bundle.path.resolve(), args.model)
    if args.json:
        print(json.dumps({"name": name, "folder": str(bundle.path)}))
    else:
        shown = printable(name)
        print(f"{shown}: {printable(str(bundle.path))}\ntry it: {own_command()} run {shown}")
    return 0
