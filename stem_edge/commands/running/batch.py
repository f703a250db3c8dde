"""The command `stem-edge batch`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, cast

from stem_edge.batches.batch import Batch, BatchKeywords, batch, split
from stem_edge.cluster.batches import ray_answers
from stem_edge.commands.options.answers import add_sampling, sampling_options
from stem_edge.commands.options.arguments import add_ray
from stem_edge.commands.options.loading import BUNDLE_HELP, add_loading, loading_options
from stem_edge.hub.fetch import pinned
from stem_edge.units import format_rate

if TYPE_CHECKING:
    from stem_edge.batches.settings import Answers

EXIT_ERRORS, EXIT_INTERRUPTED = 1, 130

DESCRIPTION = """\
Answer many prompts: a line of JSON for each row of IN is appended to OUT as it is complete. Rows whose id
OUT has are done, so the same command goes on after Ctrl-C, a crash or a power cut, and none is answered
twice."""

EPILOG = """\
examples:
  stem-edge batch model prompts.jsonl results.jsonl
  stem-edge batch model prompts.jsonl results.jsonl -n 64 --stop "."
  stem-edge batch chat_model requests.jsonl results.jsonl --sequences 16
  stem-edge batch model prompts.parquet results.jsonl --column text
  stem-edge batch model prompts.jsonl results.jsonl --retry-errors

A row of IN is one of

  {"prompt": "Once upon a time", "id": "a", "max_new_tokens": 20}
  {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0.8}
  {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}

The last is OpenAI's batch form; its body is answered as `stem-edge serve` would, by the fields that it
has. The others take options of choosing tokens from this command where they have none. Without an id,
the number of its line is a row's id. What is wrong with a row becomes its result, an object with "error".

Up to 8 answers are computed together, as far as memory allows; --sequences N changes that, and has
room for N full contexts.

It ends with status 0 if all rows of OUT are answers, and with 1 if some are errors."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", help=BUNDLE_HELP)
    add("input", metavar="IN", help="JSON lines or parquet; - for lines of stdin")
    add("output", metavar="OUT", help="file that results are appended to, as JSON lines")
    add("--column", metavar="NAME", help="column of a parquet file that has the prompts")
    retry = "drop the errors that OUT has, and answer their rows again"
    add("--retry-errors", action="store_true", help=retry)
    name = "name of the model in results of OpenAI's form (default: that of the bundle)"
    add("--name", help=name)
    add_ray(parser, "answer rows on all machines of a cluster, which share the disk of BUNDLE")
    add("--json", action="store_true", help="print figures as one JSON object at the end")
    add("-q", "--quiet", action="store_true", help="print neither progress nor figures")
    add_sampling(parser.add_argument_group("choosing tokens, where a row does not say"))
    add_loading(parser.add_argument_group("how to load"))
    parser.set_defaults(sequences=None, seed=0)


def run(args: argparse.Namespace) -> int:
    options = cast(BatchKeywords, {**loading_options(args), **sampling_options(args)})
    options["progress"] = False if args.quiet else None
    here = args.ray is None
    given: BatchKeywords = options if here else {"progress": options["progress"]}
    try:
        found = batch(
            args.input,
            args.output,
            args.bundle if here else None,
            column=args.column,
            retry_errors=args.retry_errors,
            name=args.name if here else None,
            answers=None if here else _ray_answers(args, options),
            **given,
        )
    except KeyboardInterrupt:
        told = f"interrupted; {args.output} has what is complete, and the same command goes on"
        print(f"stem-edge: {told}", file=sys.stderr)
        return EXIT_INTERRUPTED
    if args.json:
        print(json.dumps(asdict(found)))
    elif not args.quiet:
        print(report(found), file=sys.stderr)
    return EXIT_ERRORS if found.errors else 0


def report(found: Batch) -> str:
    """Return the figures of a batch as a line."""
    rows = found.answered + found.failed
    speed = f"{_count(found.tokens, 'token')} in {found.seconds:.3g} s"
    if found.seconds:
        speed += f", {format_rate(found.tokens / found.seconds)} tokens/s"
    parts = [f"{_count(rows, 'row')}, {speed}" if rows else "no row was left to answer"]
    if found.errors:
        parts.append(f"{_count(found.errors, 'error')} among {_count(found.results, 'result')}")
        if found.first_error is not None:
            parts[-1] += f" ({found.first_error})"
        parts.append("--retry-errors answers their rows again")
    return "; ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _ray_answers(args: argparse.Namespace, options: BatchKeywords) -> Answers:
    """Return what computes on a cluster."""
    bundle = pinned(args.bundle, options["progress"])  # the same commit on each machine
    loading, settings = split(options, args.name, bundle)
    return ray_answers(bundle, loading, settings, args.ray)
