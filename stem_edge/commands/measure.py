"""The command `stem-edge measure`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from stem_edge.commands.loading import add_loading, loading_options
from stem_edge.measuring.bench.measure_report import explanation, report_table, to_csv, to_dict
from stem_edge.measuring.bench.measurement import measure
from stem_edge.measuring.bench.plots import check_plot, draw, plot
from stem_edge.measuring.memory.devices import DEVICES
from stem_edge.measuring.memory.sampler import TOTALS_SECONDS
from stem_edge.measuring.run.workload import NEW_TOKENS, PROMPT_TOKENS
from stem_edge.progress import show_status

DESCRIPTION = """\
Run a bundle once in a process of its own, and show what it takes: time, and memory by kind, for each
phase (start, import, load, prefill, decode), beside what was predicted.

"Uses 5 GB" can mean many things. Anonymous memory is what can get a process killed; pages mapped from
files the system takes back when it needs them. Here they are apart, and --explain says what each word
means on this system."""

EPILOG = """\
examples:
  stem-edge measure model
  stem-edge measure model --text book.txt --prompt-tokens 2000 --memory 600MB --plot run.png
  stem-edge measure model --device phone-4gb      inside real limits, where this machine allows
  stem-edge measure model --json > run.json

The tokens are those of a text, also while decoding: which rows are read, and how often, depends on
them. Nothing is kept of the run: a second one begins with the same row cache.

devices: """


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG + ", ".join(DEVICES)
    parser.add_argument("bundle", metavar="BUNDLE", help="folder that stem-edge export wrote")
    work = parser.add_argument_group("the run")
    add_work(work, "take the bundle out of the page cache first")
    work.add_argument(
        "--device", metavar="NAME", help="run inside the limits of a device, see below"
    )
    work.add_argument(
        "--interval",
        type=float,
        metavar="SECONDS",
        default=TOTALS_SECONDS,
        help=f"between samples of the memory ({TOTALS_SECONDS})",
    )
    _add_output(parser.add_argument_group("output"))
    add_loading(parser.add_argument_group("the machine"))


def add_work(group: argparse._ArgumentGroup, cold: str) -> None:
    """Declare which tokens are run, and with which files in the page cache."""
    group.add_argument(
        "--text",
        metavar="FILE",
        help="a text in UTF-8, or token ids as .npy or .int32 (a text inside stem-edge)",
    )
    for name, what, count in (
        ("--prompt-tokens", "of a prompt, from the text", PROMPT_TOKENS),
        ("--new-tokens", "decoded after the prompt", NEW_TOKENS),
    ):
        group.add_argument(
            name, type=int, metavar="N", help=f"{what} ({count}, or what the context holds)"
        )
    group.add_argument("--cold", action="store_true", help=f"{cold} (Linux)")


def _add_output(group: argparse._ArgumentGroup) -> None:
    form = group.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="figures, samples, definitions as JSON")
    form.add_argument(
        "--csv", action="store_true", help="a line for each phase, in bytes and seconds"
    )
    form.add_argument("--explain", action="store_true", help="say what every word means")
    group.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw it: .png, .pdf or .svg; needs the extra [plot]",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, and print what was asked for."""
    if args.plot is not None:  # before minutes are spent on measuring
        check_plot(args.plot)
    found = measure(
        args.bundle,
        args.text,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        device=args.device,
        cold=args.cold,
        interval=args.interval,
        notify=show_status,
        **loading_options(args),
    )
    if args.json:
        print(json.dumps(to_dict(found), indent=1, default=str))
    else:
        print(to_csv(found) if args.csv else report_table(found), end="" if args.csv else "\n")
    if args.explain:
        print("\n" + explanation(found))
    if args.plot is not None:
        draw(args.plot, lambda path: plot(found, path))
    return 0
