"""The command `stem-edge inspect`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from textwrap import wrap
from typing import TYPE_CHECKING, get_args

import stem_edge
from stem_edge.bundle.opening import open_bundle
from stem_edge.commands.bundles.bundle_report import bundle_figures, bundle_table
from stem_edge.commands.options.loading import BUNDLE_FOLDER, add_loading
from stem_edge.errors import InputError
from stem_edge.graph.formats import EngineName
from stem_edge.measuring.analysis import cost_figures, cost_table, geometry, geometry_table
from stem_edge.shown import format_size

if TYPE_CHECKING:
    from stem_edge.runtime import MemoryPlan

DESCRIPTION = """\
Show what a bundle is made of: architecture, parameters, bytes on flash and of
the backbone, types, what quantization cost, and files. Only the manifest is
read."""

EPILOG = """\
examples:
  stem-edge inspect model --memory 600MB
  stem-edge inspect model --cost"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", help=BUNDLE_FOLDER)
    add("--json", action="store_true", help="print the figures as JSON")
    instead = parser.add_mutually_exclusive_group()
    memory = "show the memory plan under this limit (default: half the free)"
    instead.add_argument("--memory", nargs="?", const="", metavar="SIZE", help=memory)
    cost = "show multiply-adds, weights and rows of a token"
    instead.add_argument("--cost", action="store_true", help=cost)
    geometry = "show angles between rows, and lengths (reads all tables)"
    instead.add_argument("--geometry", action="store_true", help=geometry)
    add_loading(parser, "tables")
    context = "with --memory and --cost: tokens of the context"
    add("--context-length", type=int, metavar="N", help=context)
    engines = ("auto", *get_args(EngineName))
    engine = "with --memory: what runs the backbone"
    add("--engine", choices=engines, default="auto", metavar="NAME", help=engine)
    add_loading(parser, "provider", "device_memory")


def run(args: argparse.Namespace) -> int:
    _check_options(args)
    shown = _report(args)
    print(json.dumps(shown, indent=1) if args.json else shown)
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Refuse options that do not go together. Raises InputError."""
    if args.memory is None and (args.provider != "cpu" or args.device_memory is not None):
        raise InputError("--provider and --device-memory belong to --memory here; add --memory")
    if args.geometry and args.tables is not None:
        raise InputError(
            "--geometry reads all rows; copy the tables into the bundle, leave out --tables"
        )
    if args.memory is None and args.engine != "auto":
        raise InputError("--engine belongs to --memory, which is not given; add --memory")


def _report(args: argparse.Namespace) -> object:
    """Return the report on a bundle that the options choose: figures for JSON, or a text."""
    if args.geometry:
        found = geometry(args.bundle)
        return found if args.json else geometry_table(found)
    if args.memory is None:
        bundle = open_bundle(args.bundle, args.tables)
        if args.cost:
            count = cost_figures if args.json else cost_table
            return count(bundle, args.context_length)
        return bundle_figures(bundle) if args.json else bundle_table(bundle)
    plan = stem_edge.memory_plan(
        args.bundle,
        args.memory or None,
        context_length=args.context_length,
        engine=args.engine,
        provider=args.provider,
        device_memory=args.device_memory,
        tables=args.tables,
    )
    return memory_figures(plan) if args.json else memory_table(plan)


def memory_figures(plan: MemoryPlan) -> dict[str, object]:
    """Return a memory plan as plain JSON values: bytes and counts."""
    figures = asdict(plan) | {"total": plan.total}
    if plan.device:
        figures["device"] |= {"total": plan.device.total}
    return figures


def memory_table(plan: MemoryPlan) -> str:
    """Return a memory plan for people: anonymous memory, part by part."""
    lines = [_amount("engine", plan.engine)]
    lines += [_amount("provider", plan.provider)] if plan.device else []
    lines += _parts([*plan.parts(), ("anonymous memory at most", plan.total)])
    if plan.prefill_refused:
        lines += ["", *wrap(f"prefill graph not used: {plan.prefill_refused}")]
    if plan.preparing is not None:
        lines += ["", f"the first load prepares it: {plan.preparing}"]
    if plan.device is not None:
        lines += ["", f"memory of the device ({plan.provider})"]
        lines += _parts([*plan.computing(plan.device), ("at most", plan.device.total)])
    return "\n".join(lines)


def _amount(name: str, shown: str) -> str:
    return f"{name:<34}{shown:>10}"


def _parts(parts: list[tuple[str, int]]) -> list[str]:
    return [_amount(name, format_size(nbytes)) for name, nbytes in parts]
