"""The command `stem-edge batch`: run every prompt of a file."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import cast

from stem_edge.apps.batches.batch import Batch, BatchKeywords, batch
from stem_edge.commands.options.answers import add_sampling, sampling_options
from stem_edge.commands.options.loading import BUNDLE_HELP, add_loading, loading_options
from stem_edge.text_table import format_rate

EXIT_ERRORS, EXIT_INTERRUPTED = 1, 130

DESCRIPTION = """\
Run every prompt in a file and append the results to another, a line of JSON
each. Rows whose id OUT has are done, so the same command goes on after a crash."""

EPILOG = """\
a row of IN:
  {"prompt": "Once upon a time", "id": "a", "max_new_tokens": 20}
  {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0.8}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", help=BUNDLE_HELP)
    add("input", metavar="IN", help="JSON lines")
    add("output", metavar="OUT", help="file that results are appended to, as JSON lines")
    ray = "Ray cluster: auto (the one here), or host:port"
    add("--ray", metavar="ADDRESS", help=ray)
    add("--json", action="store_true", help="print figures as one JSON object at the end")
    add("-q", "--quiet", action="store_true", help="print neither progress nor figures")
    add_sampling(parser.add_argument_group("choosing tokens, if a row does not"))
    add_loading(parser.add_argument_group("loading"))
    parser.set_defaults(sequences=None, seed=0)


def run(args: argparse.Namespace) -> int:
    options = cast(BatchKeywords, {**loading_options(args), **sampling_options(args)})
    options["progress"] = False if args.quiet else None
    try:
        found = batch(args.input, args.output, args.bundle, ray=args.ray, **options)
    except KeyboardInterrupt:
        told = f"interrupted; {args.output} has what is complete, and the same command goes on"
        print(f"stem-edge: {told}", file=sys.stderr)
        return EXIT_INTERRUPTED
    if args.json:
        print(json.dumps(asdict(found)))
    elif not args.quiet:
        print(report(found), file=sys.stderr)
    return EXIT_ERRORS if found.errors else 0


def report(result: Batch) -> str:
    rows = result.answered + result.failed
    speed = f"{_count(result.tokens, 'token')} in {result.seconds:.3g} s"
    if result.seconds:
        speed += f", {format_rate(result.tokens / result.seconds)} tokens/s"
    parts = [f"{_count(rows, 'row')}, {speed}" if rows else "no row was left to run"]
    if result.errors:
        parts.append(f"{_count(result.errors, 'error')} among {_count(result.results, 'result')}")
        parts[-1] += f" ({result.first_error})"
        parts.append("to run failed rows again, delete their lines from OUT")
    return "; ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
