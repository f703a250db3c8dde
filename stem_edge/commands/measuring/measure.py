"""The command `stem-edge measure`: time and memory of bundles and GGUF files."""

from __future__ import annotations

import argparse
import json
from typing import Any

from stem_edge.apps.measuring.runs.measure import ROUNDS, measure
from stem_edge.apps.measuring.runs.report import report_table, to_dict
from stem_edge.apps.measuring.workload import NEW_TOKENS, PROMPT_TOKENS
from stem_edge.commands.options.loading import BUNDLE_HELP, add_loading, loading_options
from stem_edge.errors import InputError
from stem_edge.progress import show_status

DESCRIPTION = """\
Run a bundle, and others to compare it with, in new processes. Shows time and
memory of each phase (start, load, first token, prompt, decode), and tokens a
second. Anonymous memory and mapped files have columns of their own."""

EPILOG = """\
examples:
  stem-edge measure model --memory 600MB --cold
  stem-edge measure model --cases resident emulate-flash=emmc
  stem-edge measure model --against other FILE.gguf,lazy"""

OPTIONS = ("text", "against", "cases", "prompt_tokens", "new_tokens", "rounds", "cold")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("bundle", nargs="?", metavar="BUNDLE", help=BUNDLE_HELP)
    many: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    cases = "the same with other options, like engine=ggml,slots=9"
    add("--cases", metavar="OPTION=VALUE,...", help=cases, **many)
    against = "other bundles, and files that llama.cpp runs"
    add("--against", metavar="PATH", help=against, **many)
    add("--text", metavar="FILE", help="text, or token ids as .npy or .int32")
    prompt = f"tokens of the prompt (default: {PROMPT_TOKENS})"
    add("--prompt-tokens", type=int, metavar="N", help=prompt)
    new = f"tokens decoded (default: {NEW_TOKENS})"
    add(
        "-n", "--max-new-tokens", "--new-tokens", dest="new_tokens", type=int, metavar="N", help=new
    )
    add("--rounds", type=int, metavar="N", default=ROUNDS, help=f"(default: {ROUNDS})")
    cold = "drop files from the page cache before runs (Linux)"
    add("--cold", action="store_true", help=cold)
    add("--json", action="store_true", help="print all figures as JSON")
    add_loading(parser.add_argument_group("loading"))


def run(args: argparse.Namespace) -> int:
    # argparse parses a bundle after an option of several words as the last of these words.
    if args.bundle is None:
        words = args.against or args.cases
        if not words:
            raise InputError("measure needs the folder of a BUNDLE")
        args.bundle = words.pop()
    given: dict[str, Any] = {name: getattr(args, name) for name in OPTIONS}
    found = measure(args.bundle, **given, notify=show_status, **loading_options(args))
    print(json.dumps(to_dict(found), indent=1) if args.json else report_table(found))
    return 0
