"""The command `stem-edge measure`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from stem_edge.commands.options.described import values_of
from stem_edge.commands.options.loading import add_loading, loading_options
from stem_edge.drawing import check_plot, draw
from stem_edge.measuring.memory.device_profiles import DEVICES
from stem_edge.measuring.memory.sampler import TOTALS_SECONDS
from stem_edge.measuring.phases.measurement import measure
from stem_edge.measuring.phases.plots import plot
from stem_edge.measuring.phases.report import explanation, report_table, to_csv, to_dict
from stem_edge.measuring.workload import NEW_TOKENS, PROMPT_TOKENS
from stem_edge.progress import show_status

DESCRIPTION = """\
Run a bundle once in its own process, and show the time and the memory of each kind that it takes in
each phase (start, import, load, prefill, decode), beside what was predicted.

"Uses 5 GB" can mean many things. Anonymous memory can get a process killed; pages mapped from files
are taken back by the system when it needs them. They are listed apart here, and --explain defines
every word for this system."""

EPILOG = """\
examples:
  stem-edge measure model
  stem-edge measure model --text book.txt --prompt-tokens 2000 --memory 600MB --plot run.png
  stem-edge measure model --device phone-4gb
  stem-edge measure model --json > run.json

Tokens come from a text, while decoding as well, because they decide which rows are read, and how
often. The run leaves nothing behind: the next one begins with the same row cache.

devices: """


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG + ", ".join(DEVICES)
    parser.add_argument(
        "bundle", metavar="BUNDLE", help="folder that stem-edge export wrote, or hf:org/name"
    )
    work = parser.add_argument_group("the run")
    add_work(work, "drop the bundle from the page cache first")
    device = "run within the limits of a device, listed below; the output says which are real"
    work.add_argument("--device", metavar="NAME", help=device)
    interval = f"time between samples of the memory (default: {TOTALS_SECONDS})"
    add = work.add_argument
    add("--interval", type=float, metavar="SECONDS", default=TOTALS_SECONDS, help=interval)
    _add_output(parser.add_argument_group("output"))
    add_loading(parser.add_argument_group("how to load"))


def add_work(group: argparse._ArgumentGroup, cold: str) -> None:
    """Declare which tokens are run, and `cold`: the help of running without the page cache."""
    text = (
        "text in UTF-8, or token ids as .npy or .int32 (default: a text that comes with stem-edge)"
    )
    group.add_argument("--text", metavar="FILE", help=text)
    for name, what, count in (
        ("--prompt-tokens", "tokens of the prompt", PROMPT_TOKENS),
        ("--new-tokens", "tokens decoded after the prompt", NEW_TOKENS),
    ):
        tokens = f"{what} (default: {count}, or what the context holds)"
        group.add_argument(name, type=int, metavar="N", help=tokens)
    group.add_argument("--cold", action="store_true", help=f"{cold} (Linux)")


def _add_output(group: argparse._ArgumentGroup) -> None:
    form = group.add_mutually_exclusive_group()
    form.add_argument(
        "--json", action="store_true", help="print figures, samples and definitions as JSON"
    )
    csv = "print a line for each phase, in bytes and seconds"
    form.add_argument("--csv", action="store_true", help=csv)
    form.add_argument("--explain", action="store_true", help="also define every word of the table")
    plot = "also draw the run, as .png, .pdf or .svg (needs pip install 'stem-edge[plot]')"
    group.add_argument("--plot", type=Path, metavar="FILE", help=plot)


def run(args: argparse.Namespace) -> int:
    if args.plot is not None:
        check_plot(args.plot)  # now, because measuring may take minutes and must not be in vain
    found = measure(**values_of(args, measure), notify=show_status, **loading_options(args))
    if args.json:
        print(json.dumps(to_dict(found), indent=1, default=str))
    else:
        print(to_csv(found) if args.csv else report_table(found), end="" if args.csv else "\n")
    if args.explain:
        print("\n" + explanation(found))
    if args.plot is not None:
        draw(args.plot, lambda path: plot(found, path))
    return 0
