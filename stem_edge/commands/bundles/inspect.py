"""The command `stem-edge inspect`: show a bundle's architecture, sizes and files."""

from __future__ import annotations

import argparse
import json

from stem_edge.apps.measuring.analysis import cost_figures, cost_table, geometry, geometry_table
from stem_edge.commands.bundles.bundle_report import bundle_figures, bundle_table
from stem_edge.commands.options.loading import BUNDLE_HELP, CONTEXT, add_loading
from stem_edge.errors import InputError
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.loading import open_or_make

DESCRIPTION = """\
Show what a bundle is made of: architecture, parameters, bytes on flash and of
the backbone, types, what quantization cost, and files. Only the manifest is
read."""

EPILOG = """\
examples:
  stem-edge inspect model --json
  stem-edge inspect model --cost"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", help=BUNDLE_HELP)
    add("--json", action="store_true", help="print the figures as JSON")
    instead = parser.add_mutually_exclusive_group()
    cost = "show multiply-adds, weights and rows of a token"
    instead.add_argument("--cost", action="store_true", help=cost)
    geometry = "show angles between rows, and lengths (reads all tables)"
    instead.add_argument("--geometry", action="store_true", help=geometry)
    add_loading(parser, "tables")
    context = "with --cost: tokens of the context"
    add(*CONTEXT, type=int, metavar="N", help=context)


def run(args: argparse.Namespace) -> int:
    if args.geometry and args.tables is not None:
        raise InputError(
            "--geometry reads all rows; copy the tables into the bundle, leave out --tables"
        )
    shown = _report(args)
    print(json.dumps(shown, indent=1) if args.json else shown)
    return 0


def _report(args: argparse.Namespace) -> object:
    """Return the chosen report on a bundle: a dict for JSON, or text."""
    if args.geometry:
        found = geometry(args.bundle)
        return found if args.json else geometry_table(found)
    bundle = open_or_make(args.bundle, LoadOptions(tables=args.tables))
    if args.cost:
        count = cost_figures if args.json else cost_table
        return count(bundle, args.context_length)
    return bundle_figures(bundle) if args.json else bundle_table(bundle)
