"""The command `stem-edge lm-eval`."""

from __future__ import annotations

import argparse
import io
import sys
from contextlib import nullcontext, redirect_stdout

from lm_eval.__main__ import cli_evaluate

from stem_edge.errors import InputError

DESCRIPTION = """\
Evaluate a bundle with EleutherAI's lm-evaluation-harness: the harness' own command, which knows the
model stem_edge here and takes it unless --model says otherwise. Tasks and their data are the
harness' business; it downloads what it does not have."""

EPILOG = """\
arguments of the model, after --model_args as name=value,name=value:
  bundle=FOLDER             what stem-edge export wrote
  memory=600MB, threads=2, context_length=2048, engine=ggml, reads=mmap, prefill_graph=false, ...
                            as `stem-edge generate` and stem_edge.load take them
  max_gen_toks=256          to generate where a task does not say
  reuse=false               compute each choice of a question from its beginning

examples:
  stem-edge lm-eval run --tasks arc_easy --model_args bundle=model,memory=600MB --limit 100
  stem-edge lm-eval run --tasks wikitext --model_args bundle=model,context_length=2048
  stem-edge lm-eval ls tasks
  stem-edge lm-eval run --help               all options of the harness"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See stem_edge.commands.main.Command."""
    parser.epilog = EPILOG
    parser.add_argument(
        "command", choices=("run", "ls", "validate"), help="a command of the harness"
    )
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments, as they are"
    )


def run(args: argparse.Namespace) -> int:
    """See stem_edge.commands.main.Command."""
    # First, so that a --model further on wins.
    model = ["--model", "stem_edge"] if args.command == "run" and args.arguments else []
    before, told = sys.argv, io.StringIO()
    asks = not args.arguments or not {"-h", "--help"}.isdisjoint(args.arguments)
    # The harness' command reads its arguments from nowhere else.
    sys.argv = ["stem-edge lm-eval", args.command, *model, *args.arguments]
    try:
        with redirect_stdout(told) if asks else nullcontext():
            cli_evaluate()
    except ValueError as error:  # with which it refuses tasks that there are not
        if "not found" not in str(error):
            raise
        raise InputError(f"{error}; list them with: stem-edge lm-eval ls tasks") from error
    finally:
        sys.argv = before
        # Its help names the model that it would take.
        print(told.getvalue().replace("(default: hf)", "(default: stem_edge)"), end="")
    return 0
