"""The command `stem-edge inspect`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, get_args

import stem_edge
from stem_edge.bundle.opening import open_bundle
from stem_edge.commands.bundles.bundle_report import bundle_figures, bundle_table
from stem_edge.commands.options.arguments import engine_name
from stem_edge.commands.options.loading import add_loading, parse_libraries, parse_providers
from stem_edge.errors import InputError
from stem_edge.graph.formats import EngineName
from stem_edge.measuring.analysis import cost_figures, cost_table, geometry, geometry_table
from stem_edge.shown import printable
from stem_edge.text_table import table
from stem_edge.units import format_size

if TYPE_CHECKING:
    from stem_edge.runtime import MemoryPlan
    from stem_edge.runtime.backends.onnxruntime.providers.resolve import (
        ListedDevice,
        ListedProvider,
    )

DESCRIPTION = """\
Show what a bundle is made of: architecture, STEM layers, number of parameters, bytes on flash and
of the backbone, types, what quantization cost, and files. Only the manifest is read.

Other questions have an option each: --memory, what loading it here and now would take; --cost,
what a token costs by the formulas of the STEM paper; --geometry, how the rows of the tables point
(this reads the tables from end to end); --providers without a bundle, what onnxruntime can run on
here."""

EPILOG = """\
examples:
  stem-edge inspect model
  stem-edge inspect model --memory 600MB
  stem-edge inspect model --cost
  stem-edge inspect --providers"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    bundle = "folder that stem-edge export wrote, or hf:org/name"
    parser.add_argument("bundle", metavar="BUNDLE", nargs="?", help=bundle)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    instead = parser.add_mutually_exclusive_group()
    memory = (
        "show the memory plan under this limit, like 600MB (default: half of the RAM that is free)"
    )
    instead.add_argument("--memory", nargs="?", const="", metavar="SIZE", help=memory)
    cost = "show multiply-adds, weights and rows of a token, as the STEM paper counts them"
    instead.add_argument("--cost", action="store_true", help=cost)
    geometry = "show the angles between rows of a table, and their lengths"
    instead.add_argument("--geometry", action="store_true", help=geometry)
    providers = (
        "without names and BUNDLE: list the execution providers that can be used here, and how to "
        "install others; with names, and with --memory: plan for these, as generate takes them"
    )
    parser.add_argument("--providers", nargs="?", const="", metavar="NAME,...", help=providers)
    add_loading(parser, "provider_libraries", "tables")
    context = "with --memory and --cost: tokens of prompt and answer together"
    parser.add_argument("--context-length", type=int, metavar="N", help=context)
    _add_planning(parser.add_argument_group("with --memory"))


def _add_planning(group: argparse._ArgumentGroup) -> None:
    engines = ("auto", *get_args(EngineName))
    engine = "what runs the backbone (default: auto, as generate chooses)"
    group.add_argument("--engine", type=engine_name, choices=engines, default="auto", help=engine)
    repack = "plan for ggml's 4-bit matrices copied into memory"
    group.add_argument("--repack", action="store_true", help=repack)
    device = "limit of the accelerator's memory, like 2GB"
    group.add_argument("--device-memory", metavar="SIZE", help=device)


def run(args: argparse.Namespace) -> int:
    if args.bundle is None and args.memory and Path(args.memory).is_dir():
        # argparse takes the folder of `--memory BUNDLE` for the size.
        args.bundle, args.memory = args.memory, ""
    _check_options(args)
    if args.providers == "":
        _show_providers(args)
    else:
        shown = _report(args)
        print(json.dumps(shown, indent=1) if args.json else shown)
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Refuse options that do not go together. Raises InputError."""
    _check_providers(args)
    if args.geometry and args.tables is not None:
        raise InputError(
            "--geometry reads all rows; copy the tables into the bundle, leave out --tables"
        )
    if args.memory is None and (args.repack or args.engine != "auto"):
        raise InputError(
            "--engine and --repack belong to --memory, which is not given; add --memory"
        )


def _check_providers(args: argparse.Namespace) -> None:
    others = ("bundle", "memory", "context_length", "device_memory")
    given = [name for name in others if getattr(args, name) is not None]
    given += [name for name in ("cost", "geometry") if getattr(args, name)]
    listing = args.providers == ""
    if listing and given:
        name = "BUNDLE" if given[0] == "bundle" else f"--{given[0].replace('_', '-')}"
        raise InputError(
            f"--providers without names shows this machine, and {name} is given; leave it out, or "
            "name providers after it, for --memory"
        )
    if args.providers and args.bundle is None:
        raise InputError(
            "--providers with names needs a BUNDLE before it and --memory; without names it shows "
            "what this machine has"
        )
    if not listing and args.bundle is None:
        raise InputError("inspect needs the folder of a BUNDLE, or --providers")
    if args.memory is None and (args.providers or args.device_memory is not None):
        raise InputError("--providers and --device-memory belong to --memory here; add --memory")
    if args.provider_libraries and args.providers is None:
        raise InputError("--provider-library belongs to --providers, which is not given; add it")


def _show_providers(args: argparse.Namespace) -> None:
    found = stem_edge.providers(parse_libraries(args.provider_libraries))
    if args.json:
        print(json.dumps([asdict(listed) for listed in found], indent=1))
    else:
        print("\n".join(_provider_table(found)))


def _provider_table(found: Sequence[ListedProvider]) -> list[str]:
    """Lines of a table for people: providers that can be used come first."""
    rows = [("provider", "", "devices, or what brings it")]
    for listed in sorted(found, key=lambda listed: not listed.available):
        if not listed.available:
            rows.append((listed.name, "no", printable(listed.reason)))
            continue
        memory = "memory of its own" if listed.own_memory else ""
        texts = [_device(device) for device in listed.devices] or [memory]
        names = [listed.name, *[""] * len(texts)]
        rows += [(name, "", printable(text)) for name, text in zip(names, texts, strict=False)]
    return table(rows, "l")


def _device(device: ListedDevice) -> str:
    known = device.name if device.vendor in device.name else f"{device.vendor} {device.name}"
    return f"{device.kind} {known.strip()}{', memory of its own' * device.own_memory}"


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
        repack=args.repack,
        providers=parse_providers(args.providers),
        provider_libraries=parse_libraries(args.provider_libraries),
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
    lines += [_amount("provider", plan.provider)] if plan.variant else []
    lines += _parts([*plan.parts(), ("anonymous memory at most", plan.total)])
    if plan.prefill_refused:
        lines += ["", *wrap(f"prefill graph not used: {plan.prefill_refused}")]
    if plan.preparing is not None:
        lines += ["", f"the first load prepares it: {plan.preparing}"]
    if plan.device is not None:
        lines += ["", f"memory of the device ({plan.provider}, {plan.variant})"]
        lines += _parts([*plan.device.parts(), ("at most", plan.device.total)])
    return "\n".join(lines)


def _amount(name: str, shown: str) -> str:
    return f"{name:<34}{shown:>10}"


def _parts(parts: list[tuple[str, int]]) -> list[str]:
    return [_amount(name, format_size(nbytes)) for name, nbytes in parts]
