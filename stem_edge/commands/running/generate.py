"""The command `stem-edge generate`: continue a text."""

from __future__ import annotations

import argparse
import json
import sys

from stem_edge.commands.options.answers import (
    add_sampling,
    add_text,
    as_object,
    check_grammar,
    given_text,
    sampled,
    sampling_params,
    write_text,
)
from stem_edge.commands.options.arguments import read_text
from stem_edge.commands.options.loading import BUNDLE_HELP, add_loading, loading_options
from stem_edge.errors import InputError
from stem_edge.runtime import load
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling_params import SamplingParams

MAX_PROMPT_CHARS = 64 << 20  # a limit, because stdin may have no end

DESCRIPTION = """\
Continue a text, without a chat template (stem-edge run has it). Figures go to
stderr. Without PROMPT, stdin is read."""

EPILOG = """\
examples:
  stem-edge generate model "Once upon a time" --memory 600MB
  stem-edge generate model --temp 0.8 --seed 1 < prompt.txt"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", help=BUNDLE_HELP)
    add_text(add, "PROMPT", "text to continue")
    edit = "apply an edit; repeatable: later ones win"
    add("--edit", action="append", metavar="FILE", default=[], help=edit)
    add("--json", action="store_true", help="print one JSON object at the end")
    add("-q", "--quiet", action="store_true", help="print no line of figures")
    add_sampling(parser.add_argument_group("choosing tokens"))
    add_loading(parser.add_argument_group("loading"))


def run(args: argparse.Namespace) -> int:
    params, prompt = sampling_params(args), _prompt(args)
    with load(args.bundle, **loading_options(args)) as model, model.edited(*args.edit):
        check_grammar(model, params, args)
        if args.json:
            chunks = list(model.generate(prompt, params))
            print(json.dumps(as_object(chunks, model.stats), ensure_ascii=False))
        else:
            _stream(model, prompt, params, quiet=args.quiet)
    return 0


def _prompt(args: argparse.Namespace) -> str:
    if (given := given_text(args)) is not None:
        return given
    if sys.stdin.isatty():
        raise InputError('no prompt; give one like "Once upon a time", or by stdin (< FILE)')
    return read_text(None, "prompt", MAX_PROMPT_CHARS)


def _stream(model: Model, prompt: str, params: SamplingParams, *, quiet: bool) -> None:
    try:
        for chunk in model.generate(prompt, params):
            write_text(chunk.text)
    finally:  # so that the statistics are printed after Ctrl-C, too
        if model.stats.prompt_tokens:
            sys.stdout.write("\n")
            sys.stdout.flush()
            if not quiet:
                print(f"{model.stats.line()}; {sampled(model.chosen(params))}", file=sys.stderr)
