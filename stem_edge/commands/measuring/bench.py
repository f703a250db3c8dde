"""The command `stem-edge bench`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from stem_edge.commands.measuring.measure import add_work
from stem_edge.commands.options.described import values_of
from stem_edge.commands.options.loading import add_loading, loading_options
from stem_edge.errors import InputError
from stem_edge.measuring.bench.bench import LOADS, ROUNDS, bench
from stem_edge.measuring.bench.report import report_table
from stem_edge.measuring.bench.subjects import AGAINST
from stem_edge.progress import show_status

DESCRIPTION = """\
Measure the speed and memory of a bundle, alone or beside other ways of running it (--against). Each
way runs in its own process; they take turns on the same tokens, and ratios are medians over the
rounds."""

EPILOG = """\
what --against takes:
{against}

examples:
  stem-edge bench model
  stem-edge bench model --text book.txt --against resident flash=emmc
  stem-edge bench model --against llama.cpp=FILE.gguf dense=dense_model --json > report.json
  stem-edge bench model --engine onnxruntime --against ggml repacked
  stem-edge bench model --against llama.cpp=FILE.gguf,lazy llama.cpp=FILE.gguf,no-repack --limit 2GiB
  stem-edge bench model --providers cuda --slots 2000 --against resident cpu
  stem-edge bench model --cases 1,2,4,8,16 --text book.txt --against llama.cpp=FILE.gguf
  stem-edge bench model --cases speculation --speculate on --against llama.cpp=FILE.gguf

llama.cpp needs pip install 'stem-edge[bench]'."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG.format(
        against="\n".join(f"  {name:<20} {what}" for name, what in AGAINST.items())
    )
    bundle = "folder that stem-edge export wrote, or hf:org/name"
    parser.add_argument("bundle", nargs="?", metavar="BUNDLE", help=bundle)
    against = "compare with these ways of running, listed below"
    parser.add_argument(
        "--against", nargs="+", action="extend", default=[], metavar="WHAT", help=against
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    output = "also write the JSON to this file"
    parser.add_argument("--output", type=Path, metavar="FILE", help=output)
    group = parser.add_argument_group("what is run")
    add_work(group, "also load with no file in the page cache, and decode with no tables in it")
    limit = (
        "memory, mapped files included, of each way alone, in a cgroup; each round loads it anew, "
        "with no file in the page cache (Linux)"
    )
    group.add_argument("--limit", metavar="SIZE", help=limit)
    rounds = f"times that each way runs the tokens (default: {ROUNDS})"
    group.add_argument("--rounds", type=int, metavar="N", default=ROUNDS, help=rounds)
    loads = f"times that each way is loaded (default: {LOADS})"
    group.add_argument("--loads", type=int, metavar="N", default=LOADS, help=loads)
    _add_cases(parser)
    add_loading(parser.add_argument_group("how to load"))


def run(args: argparse.Namespace) -> int:
    output: Path | None = args.output
    # Must be refused now, not after minutes of measuring.
    if output is not None and not output.absolute().parent.is_dir():
        raise InputError(f"{output.parent}: no such folder; make it first")
    _check_cases(args)
    # A bundle after --against is parsed as the last of its words, because that option takes many.
    words = args.against if args.bundle is None else [*args.against, args.bundle]
    if not words:
        raise InputError("bench needs the folder of a BUNDLE")
    given = values_of(args, bench) | {"bundle": words[-1], "against": words[:-1]}
    found = bench(**given, notify=show_status, **loading_options(args))
    printed = json.dumps(asdict(found), indent=1)
    print(printed if args.json else report_table(found), flush=True)
    if output is not None:
        try:
            output.write_text(printed + "\n")
        except OSError as error:
            raise InputError(
                f"{output}: cannot write ({error.strerror}); give --output another file"
            ) from error
    return 0


def _add_cases(parser: argparse.ArgumentParser) -> None:
    cases = (
        "numbers of sequences that decode at a time, like 1,2,4: how much faster that is than one, "
        "and how long a new one waits for its first token; or speculation: four kinds of text "
        "(copying, code, chat, prose), or --text, with and without guesses (--speculate)"
    )
    parser.add_argument("--cases", metavar="CASE,...", help=cases)
    for name in ("--batches", "--speculation"):  # of the release before
        parser.add_argument(name, nargs="?", const="", help=argparse.SUPPRESS)


def _check_cases(args: argparse.Namespace) -> None:
    """Raise InputError for options that are gone."""
    if args.batches is not None:
        raise InputError("--batches is --cases now; write for example --cases 1,2,4")
    if args.speculation is not None:
        raise InputError("--speculation is --cases now; write --cases speculation")
