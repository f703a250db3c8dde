"""The command `stem-edge fit`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from stem_edge.apps.measuring.fit import Fit, fit
from stem_edge.bundle.hub.fetch import pinned
from stem_edge.commands.options.loading import BUNDLE_HELP, CONTEXT, add_loading
from stem_edge.errors import MemoryPlanError
from stem_edge.shown import format_size
from stem_edge.text_table import table, wrapped

DESCRIPTION = """\
Say whether a bundle fits into some memory, without running it: how long a context
and how many rows fit. Here --memory includes the mapped weights, because every
token reads them."""

EPILOG = """\
examples:
  stem-edge fit model --memory 1GB
  stem-edge fit model --memory 3GB --context-length 2048"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add = parser.add_argument
    add("path", metavar="BUNDLE", help=BUNDLE_HELP)
    memory = "what the program may take, like 1GB (default: the free)"
    add("--memory", metavar="SIZE", help=memory)
    context = "tokens of prompt and answer at most"
    add(*CONTEXT, type=int, metavar="N", help=context)
    add_loading(parser, "threads", "sequences", "engine", "kv")
    add("--json", action="store_true", help="print all figures as JSON")


def run(args: argparse.Namespace) -> int:
    shown, args.path = args.path, pinned(args.path)
    try:
        found = fit(**{name: value for name, value in vars(args).items() if name != "json"})
    except MemoryPlanError as error:
        if args.json:
            raise
        print("does not fit", *wrapped(str(error)), sep="\n")
        return 1
    if args.json:
        print(json.dumps(to_dict(found), indent=1))
    else:
        lines = [f"fits into {format_size(found.memory)}", "", *_figures(found), "", "run it with:"]
        print(*(part for line in lines for part in wrapped(line, "  ") or [""]), sep="\n")
        print(_command(found, shown))
    return 0


def to_dict(one: Fit) -> dict[str, object]:
    """Return a plan's numbers as plain JSON values: bytes and tokens."""
    return {
        "types": _types(one),
        "engine": one.footprint.engine,
        "flash_nbytes": one.footprint.flash_nbytes,
        "memory": one.memory,
        "mapped": one.mapped,
        "plan": asdict(one.plan) | {"total": one.plan.total},
    }


def _figures(one: Fit) -> list[str]:
    plan = one.plan
    times = f"{plan.sequences} x " if plan.sequences > 1 else ""
    rows = [
        ("types", _types(one)),
        ("on flash", format_size(one.footprint.flash_nbytes)),
        ("anonymous memory, at most", format_size(plan.total)),
        *((f"  {name}", format_size(nbytes)) for name, nbytes in plan.parts() if nbytes),
        ("context", f"{times}{plan.context_length:,} tokens, keys and values in {plan.kv}"),
    ]
    if one.mapped:
        rows.append(("weights, mapped", f"{format_size(one.mapped)}, if they are to be read fast"))
    if one.tables:
        rows.append(("row cache", f"{plan.slots:,} rows"))
    if one.footprint.prefill_nbytes and not plan.prefill and plan.device is None:
        both = format_size(one.footprint.step_nbytes + one.footprint.prefill_nbytes)
        said = f"with those that decode, its matrices would take {both}, which this machine lacks"
        rows.append(("prefill graph not used", said))
    if plan.preparing:
        rows.append(("preparing, at first", plan.preparing))
    return table(rows, "l")


def _command(one: Fit, path: str) -> str:
    plan, footprint = one.plan, one.footprint
    limit = f"--memory {-(-plan.total // 10**6)}MB --context-length {plan.context_length}"
    limit += f" --sequences {plan.sequences}" * (plan.sequences > 1)
    limit += f" --kv {plan.kv}" * (footprint.kv != footprint.usual_kv)
    return f"  stem-edge generate {path} Hello {limit}"


def _types(one: Fit) -> str:
    rows = f", tables {one.tables}" if one.tables else ", a dense model"
    return f"backbone {one.footprint.backbone.name} for {one.footprint.engine}{rows}"
