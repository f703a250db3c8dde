"""The command `stem-edge lm-eval`."""

from __future__ import annotations

import argparse
import io
import sys
from contextlib import nullcontext, redirect_stdout

from lm_eval.__main__ import cli_evaluate

from stem_edge.errors import InputError

DESCRIPTION = """\
Evaluate a bundle with EleutherAI's lm-evaluation-harness. This is the harness's own command line,
in which --model is stem_edge unless you say otherwise. The harness downloads tasks and data that
it does not have."""

EPILOG = """\
arguments of the model, after --model_args as NAME=VALUE,NAME=VALUE:
  bundle=FOLDER       folder that stem-edge export wrote
  memory=600MB        and every other keyword of stem_edge.load: threads=2, context_length=2048,
                      engine=ggml, reads=mmap, prefill_graph=false, ...
  max_gen_toks=256    tokens to generate where a task does not say
  reuse=false         compute each choice of a question from its beginning
--batch_size 8 generates 8 texts at a time, which is faster, and may differ in near ties.

examples:
  stem-edge lm-eval run --tasks arc_easy --model_args bundle=model,memory=600MB --limit 100
  stem-edge lm-eval run --tasks gsm8k --batch_size 8 --model_args bundle=model
  stem-edge lm-eval run --tasks wikitext --model_args bundle=model,context_length=2048
  stem-edge lm-eval ls tasks
  stem-edge lm-eval run --help               all options of the harness"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "command", choices=("run", "ls", "validate"), help="a command of the harness"
    )
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of that command"
    )


def run(args: argparse.Namespace) -> int:
    # Must come first, so that a --model of the user wins.
    model = ["--model", "stem_edge"] if args.command == "run" and args.arguments else []
    before, told = sys.argv, io.StringIO()
    asks = not args.arguments or not {"-h", "--help"}.isdisjoint(args.arguments)
    # Set sys.argv because the harness cannot be given its arguments in another way.
    sys.argv = ["stem-edge lm-eval", args.command, *model, *args.arguments]
    try:
        with redirect_stdout(told) if asks else nullcontext():
            cli_evaluate()
    except ValueError as error:  # raised for unknown tasks, which must not be a traceback
        if "not found" not in str(error):
            raise
        raise InputError(f"{error}; list them with: stem-edge lm-eval ls tasks") from error
    finally:
        sys.argv = before
        # Correct the harness's help, because the default is ours here.
        print(told.getvalue().replace("(default: hf)", "(default: stem_edge)"), end="")
    return 0
