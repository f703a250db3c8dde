"""The command `stem-edge fit`: plan whether a bundle fits into memory, without running it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, replace

from stem_edge.bundle.hub.fetch import pinned
from stem_edge.commands.options.loading import BUNDLE_HELP, CONTEXT, add_loading
from stem_edge.errors import MemoryPlanError
from stem_edge.runtime.backends.costs import Needs
from stem_edge.runtime.backends.engines import choose_engine, loader
from stem_edge.runtime.backends.memory_plan import MemoryPlan
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.load_plan import plan_alone
from stem_edge.runtime.loading import open_or_make
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

# serve takes 84 MB for requests, and 15 MB for its own code.
RUN = "run it with (serve needs 100 MB more):"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="BUNDLE", help=BUNDLE_HELP)
    memory = "what the program may take, like 1GB (default: the free)"
    add("--memory", metavar="SIZE", help=memory)
    context = "tokens of prompt and answer at most"
    add(*CONTEXT, type=int, metavar="N", help=context)
    add_loading(parser, "threads", "sequences", "engine", "kv")
    add("--json", action="store_true", help="print all figures as JSON")


def run(args: argparse.Namespace) -> int:
    chosen = {n: v for n, v in vars(args).items() if n not in ("path", "json")}
    try:
        needs, plan = _planned(pinned(args.path), LoadOptions(**chosen))
    except MemoryPlanError as error:
        if args.json:
            raise
        print("does not fit", *wrapped(str(error)), sep="\n")
        return 1
    memory = plan.total + needs.mapped
    if args.json:
        figures = {
            "types": _types(needs),
            "engine": plan.engine,
            "flash_nbytes": needs.footprint.flash_nbytes,
            "memory": memory,
            "mapped": needs.mapped,
            "plan": asdict(plan) | {"total": plan.total},
        }
        print(json.dumps(figures, indent=1))
        return 0
    lines = [f"fits into {format_size(memory)}", "", *_figures(needs, plan), "", RUN]
    print(*(part for line in lines for part in wrapped(line, "  ") or [""]), sep="\n")
    print(*_commands(needs, plan, args.path), sep="\n")
    return 0


def _planned(path: str, options: LoadOptions) -> tuple[Needs, MemoryPlan]:
    """Plan the memory of loading; options.memory includes mapped weights here. Raises MemoryPlanError."""
    allowed, bundle = options.limit, open_or_make(path)
    engine, unlimited = choose_engine(bundle, options.engine), replace(options, memory=None)
    mapped = loader(bundle, engine, unlimited).needs(1).mapped
    if mapped >= allowed:
        raise MemoryPlanError(
            f"{bundle.path}: {format_size(allowed)} are too little: every token reads {format_size(mapped)} of "
            "weights, at least which must stay in memory; allow more, or export with fewer bits"
        )
    found, plan = plan_alone(bundle, replace(options, memory=allowed - mapped))
    return found.needs(plan.context_length), plan


def _figures(needs: Needs, plan: MemoryPlan) -> list[str]:
    footprint = needs.footprint
    times = f"{plan.sequences} x " if plan.sequences > 1 else ""
    rows = [
        ("types", _types(needs)),
        ("on flash", format_size(footprint.flash_nbytes)),
        ("anonymous memory, at most", format_size(plan.total)),
        *((f"  {name}", format_size(nbytes)) for name, nbytes in plan.parts() if nbytes),
        ("context", f"{times}{plan.context_length:,} tokens, keys and values in {plan.kv}"),
    ]
    if needs.mapped:
        rows.append(
            ("weights, mapped", f"{format_size(needs.mapped)}, if they are to be read fast")
        )
    if footprint.prefill_nbytes and not plan.prefill and plan.device is None:
        both = format_size(footprint.step_nbytes + footprint.prefill_nbytes)
        said = f"with those that decode, its matrices would take {both}, which this machine lacks"
        rows.append(("prefill graph not used", said))
    if plan.preparing:
        rows.append(("preparing, at first", plan.preparing))
    return table(rows, "l")


def _commands(needs: Needs, plan: MemoryPlan, path: str) -> Iterator[str]:
    kv = f" --kv {plan.kv}" * (plan.kv != needs.footprint.usual_kv)
    if plan.preparing:  # a first load with --memory may lack the memory for this
        yield f"  stem-edge prepare {path}{kv}"
    limit = f"--memory {-(-plan.total // 10**6)}MB --context-length {plan.context_length}{kv}"
    sequences = f" --sequences {plan.sequences}" * (plan.sequences > 1)
    yield f"  stem-edge generate {path} Hello {limit}{sequences}"


def _types(needs: Needs) -> str:
    footprint = needs.footprint
    rows = (
        f", tables {footprint.table_format.kind}" if footprint.table_format else ", a dense model"
    )
    return f"backbone {footprint.backbone.name} for {footprint.backbone.engine}{rows}"
