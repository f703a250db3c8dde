"""The command `stem-edge measure`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from stem_edge.commands.options.described import values_of
from stem_edge.commands.options.loading import add_loading, loading_options
from stem_edge.drawing import check_plot, draw
from stem_edge.errors import InputError
from stem_edge.measuring.memory.device_profiles import DEVICES
from stem_edge.measuring.runs.measure import ROUNDS, measure
from stem_edge.measuring.runs.plots import plot
from stem_edge.measuring.runs.report import report_table, to_dict
from stem_edge.measuring.workload import NEW_TOKENS, PROMPT_TOKENS
from stem_edge.progress import show_status

DESCRIPTION = """\
Run a bundle, alone or beside other ways of running it, each in its own process, and show time and
memory of each phase (start, import, load, a first token, prompt, decode), and tokens a second.

"Uses 5 GB" can mean many things. Anonymous memory can get a process killed; pages mapped from files
are taken back by the system when it needs them. They are listed apart here."""

EPILOG = """\
examples:
  stem-edge measure model
  stem-edge measure model --text book.txt --prompt-tokens 2000 --memory 600MB --plot run.png
  stem-edge measure model --device phone-4gb
  stem-edge measure model --cases resident emulate-flash=emmc engine=ggml,repack
  stem-edge measure model --against dense_model FILE.gguf FILE.gguf,lazy,no-repack --limit 2GiB

Tokens come from a text, while decoding as well, because they decide which rows are read, and how
often. A run leaves nothing behind: the next one begins with the same row cache. llama.cpp, which runs
FILE.gguf, needs pip install 'stem-edge[bench]'.

devices: """


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG + ", ".join(DEVICES)
    bundle = "folder that stem-edge export wrote, or hf:org/name"
    parser.add_argument("bundle", nargs="?", metavar="BUNDLE", help=bundle)
    group = parser.add_argument_group("what is run")
    many: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    cases = "also run it with other options, written like engine=ggml,slots=1000 or resident"
    group.add_argument("--cases", metavar="OPTION=VALUE,...", help=cases, **many)
    against = "also run these bundles, and by llama.cpp these files (,lazy ,no-lazy ,no-repack)"
    group.add_argument("--against", metavar="BUNDLE|FILE.gguf", help=against, **many)
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
    rounds = f"times that each of them runs (default: {ROUNDS})"
    group.add_argument("--rounds", type=int, metavar="N", default=ROUNDS, help=rounds)
    device = "run within the limits of a device, listed below; the output says which are real"
    group.add_argument("--device", metavar="NAME", help=device)
    limit = "memory of each process, mapped files included, in a cgroup (Linux)"
    group.add_argument("--limit", metavar="SIZE", help=limit)
    cold = "drop all files from the page cache before each run (Linux)"
    group.add_argument("--cold", action="store_true", help=cold)
    parser.add_argument("--json", action="store_true", help="print all figures and samples as JSON")
    drawn = "also draw the run, as .png, .pdf or .svg (needs pip install 'stem-edge[plot]')"
    parser.add_argument("--plot", type=Path, metavar="FILE", help=drawn)
    add_loading(parser.add_argument_group("how to load"))


def run(args: argparse.Namespace) -> int:
    if args.plot is not None:
        check_plot(args.plot)  # now, because measuring may take minutes and must not be in vain
    # A bundle after options that take many words is parsed as their last one.
    if args.bundle is None:
        words = args.against or args.cases
        if not words:
            raise InputError("measure needs the folder of a BUNDLE")
        args.bundle = words.pop()
    found = measure(**values_of(args, measure), notify=show_status, **loading_options(args))
    print(json.dumps(to_dict(found), indent=1) if args.json else report_table(found))
    if args.plot is not None:
        draw(args.plot, lambda path: plot(found, path))
    return 0
