"""The command `stem-edge bench`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from stem_edge.errors import InputError
from stem_edge.measuring.bench import LOADS, ROUNDS, bench
from stem_edge.measuring.bench_report import table
from stem_edge.measuring.bench_subjects import AGAINST
from stem_edge.measuring.workload import NEW_TOKENS, PROMPT_TOKENS
from stem_edge.progress import show_status
from stem_edge.runtime.flash import FLASH_NAMES
from stem_edge.runtime.loading_cli import add_engine, add_providers, device_options

DESCRIPTION = """\
Measure the speed and memory of a bundle, alone or side by side with others. Every engine runs in a
process of its own; they take turns with the same tokens, and ratios are medians over the rounds."""

EPILOG = """\
what --against takes:
{against}

examples:
  stem-edge bench model
  stem-edge bench model --text book.txt --against resident flash=emmc
  stem-edge bench model --against llama.cpp dense=dense_model --json > report.json
  stem-edge bench model --engine onnxruntime --against ggml repacked
  stem-edge bench model --providers cuda --slots 2000 --against resident cpu

llama.cpp and torch need pip install 'stem-edge[bench]'."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See stem_edge.cli.Command."""
    parser.epilog = EPILOG.format(
        against="\n".join(f"  {name:<18} {what}" for name, what in AGAINST.items())
    )
    parser.add_argument("bundle", metavar="BUNDLE", help="folder that stem-edge export wrote")
    parser.add_argument(
        "--against", nargs="+", action="extend", default=[], metavar="WHAT", help="see below"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the tables")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write the JSON there, beside what is printed"
    )
    _add_work(parser.add_argument_group("what is run"))
    _add_loading(parser.add_argument_group("the machine"))


def _add_work(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="a text in UTF-8, or token ids as .npy or .int32 (a text inside this package)",
    )
    fitting = "or what context and text hold"
    group.add_argument(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help=f"of a prompt ({PROMPT_TOKENS}, {fitting})",
    )
    group.add_argument(
        "--new-tokens",
        type=int,
        metavar="N",
        help=f"decode steps of a round ({NEW_TOKENS}, {fitting})",
    )
    group.add_argument("--rounds", type=int, metavar="N", default=ROUNDS, help=f"({ROUNDS})")
    group.add_argument(
        "--loads", type=int, metavar="N", default=LOADS, help=f"timed loads of each ({LOADS})"
    )
    group.add_argument(
        "--cold",
        action="store_true",
        help="also load with no file in the page cache, and decode with no tables in it (Linux)",
    )
    group.add_argument(
        "--work", metavar="DIR", help="for models of llama.cpp (bench in the user's cache folder)"
    )


def _add_loading(group: argparse._ArgumentGroup) -> None:
    add_engine(group)
    add_providers(group)
    group.add_argument(
        "--context-length", type=int, metavar="N", help="of every engine (tokens of a round)"
    )
    group.add_argument("--threads", type=int, metavar="N", help="threads (the CPUs it may use)")
    group.add_argument(
        "--slots",
        type=int,
        metavar="N",
        help="of the row cache (1 %% of the vocabulary, or what --memory leaves)",
    )
    group.add_argument(
        "--memory",
        metavar="SIZE",
        help="limit of anonymous memory and swap, like 600MB (half of what the machine leaves)",
    )
    group.add_argument(
        "--emulate-flash",
        choices=FLASH_NAMES,
        help="delay reads of every stem-edge subject as such flash would (emulated)",
    )


def run(args: argparse.Namespace) -> int:
    """See stem_edge.cli.Command."""
    _check_output(args.output)
    report = bench(
        args.bundle,
        args.text,
        against=args.against,
        prompt_tokens=args.prompt_tokens,
        new_tokens=args.new_tokens,
        rounds=args.rounds,
        loads=args.loads,
        context_length=args.context_length,
        threads=args.threads,
        slots=args.slots,
        memory=args.memory,
        emulate_flash=args.emulate_flash,
        cold=args.cold,
        engine=args.engine,
        repack=args.repack,
        work=args.work,
        notify=show_status,
        **device_options(args),
    )
    found = json.dumps(report.to_dict(), indent=1)
    print(found if args.json else table(report), flush=True)
    if args.output is not None:
        try:
            args.output.write_text(found + "\n")
        except OSError as error:
            raise InputError(
                f"{args.output}: cannot write ({error.strerror}); give --output another file"
            ) from error
    return 0


def _check_output(path: Path | None) -> None:
    """Before minutes are spent. Raises InputError."""
    if path is not None and not path.absolute().parent.is_dir():
        raise InputError(f"{path.parent}: no such folder; make it first")
