"""The command `stem-edge generate`."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import nullcontext
from dataclasses import asdict, fields
from pathlib import Path

from stem_edge.bundle.manifest import open_bundle
from stem_edge.commands.loading import add_loading, loading_options
from stem_edge.edit_files.folder import open_edits
from stem_edge.errors import InputError
from stem_edge.runtime import load
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling import RANGES, SamplingParams
from stem_edge.text_table import shown

MAX_PROMPT_CHARS = 64 << 20  # a limit, because stdin may have no end
MAX_DIGITS = 1000  # a limit, because the time of int() grows faster than the text

DESCRIPTION = """\
Continue a text. The new text goes to stdout as it is generated, and a line of figures to stderr.
Without a prompt on the command line, the prompt is read from stdin."""

EPILOG = """\
examples:
  stem-edge generate model "The capital of France is"
  stem-edge generate model "Once" -n 200 -t 0.8 --top-p 0.95 --seed 1
  stem-edge generate chat_model --chat "What is the capital of Spain?"
  stem-edge generate model --edit spain.edit "The capital of Spain is"
  stem-edge generate model --memory 600MB -f prompt.txt"""

LENGTH = f"stop after N tokens (default: {SamplingParams.max_new_tokens})"
TEMPERATURE = (
    "0: the most probable token, 1: as trained (default: 0, but 1 with --top-k, --top-p or --min-p)"
)
MIN_P = "choose among those at least P times as probable as the best (default: 0, all)"

# Field of SamplingParams -> its short option, metavar and help.
SAMPLING = {
    "max_new_tokens": ("-n", "N", LENGTH),
    "temperature": ("-t", "T", TEMPERATURE),
    "top_k": ("", "K", "choose among the K most probable (default: 0, all)"),
    "top_p": ("", "P", "choose among the most probable that add up to P (default: 1, all)"),
    "min_p": ("", "P", MIN_P),
    "repetition_penalty": ("", "R", "above 1, tokens seen before are less probable (default: 1)"),
    "seed": ("", "S", "the same seed gives the same text"),
    "logprobs": ("", "N", "with --json or --json-lines: print log probabilities of the N best"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add = parser.add_argument
    add("bundle", metavar="BUNDLE", help="folder that stem-edge export wrote")
    add("text", metavar="PROMPT", nargs="?", help="text to continue")
    add("-p", "--prompt", metavar="TEXT", help="text to continue, as an option")
    file = "continue the text in this file"
    add("-f", "--prompt-file", type=Path, metavar="FILE", help=file)
    edit = (
        "apply an edit that stem-edge edit made, given as a file or by name; may be repeated: "
        "later ones win"
    )
    add("--edit", action="append", metavar="FILE", default=[], help=edit)
    chat = "take the prompt as a user's message, and put it into the bundle's chat template"
    add("--chat", action="store_true", help=chat)
    special = "read names of special tokens in the prompt as these tokens (default: as text)"
    add("--special-tokens", dest="special_tokens_in_text", action="store_true", help=special)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object at the end")
    lines = "print a JSON object for each piece of text, then one of figures"
    form.add_argument("--json-lines", action="store_true", help=lines)
    add("-q", "--quiet", action="store_true", help="do not print the line of figures")
    _add_sampling(parser.add_argument_group("choosing tokens"))
    add_loading(parser.add_argument_group("how to load"))


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    defaults = {field.name: field.default for field in fields(SamplingParams)}
    for name, (short, metavar, text) in SAMPLING.items():
        group.add_argument(
            *([short] if short else []),
            f"--{name.replace('_', '-')}",
            type=whole_number if isinstance(RANGES[name][1], int) else float,
            metavar=metavar,
            default=defaults[name],
            help=text,
        )
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        default=[],
        help="end before this text; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    as_json = args.json or args.json_lines
    if args.logprobs is not None and not as_json:
        raise InputError("--logprobs shows in JSON only; add --json or --json-lines")
    params = SamplingParams(**{name: getattr(args, name) for name in RANGES}, stop=args.stop)
    edits = open_edits(open_bundle(args.bundle), args.edit) if args.edit else []
    prompt = _prompt(args)
    with load(args.bundle, **loading_options(args)) as model, model.edited(*edits):
        ids = _prompt_ids(model, prompt, args.chat, args.special_tokens_in_text)
        if as_json:
            _print_json(model, ids, params, lines=args.json_lines)
        else:
            _stream(model, ids, params, quiet=args.quiet)
    return 0


def whole_number(text: str) -> int:
    """Parse a whole number from the command line, with a short message for a long argument."""
    try:
        if len(text) > MAX_DIGITS:
            raise ValueError
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, found {shown(text)}") from None


def _prompt_ids(model: Model, prompt: str, chat: bool, special_tokens: bool) -> str | list[int]:
    """Return what to continue: the text itself, or its ids if it may name special tokens."""
    if chat:
        messages = [{"role": "user", "content": prompt}]
        prompt = model.chat_prompt(messages, special_tokens_in_text=special_tokens)
        # Do not add special tokens, because the template has written them.
        return model.tokenize(prompt, add_special_tokens=False, special_tokens_in_text=True)
    if special_tokens and prompt:
        return model.tokenize(prompt, special_tokens_in_text=True)
    return prompt


def _prompt(args: argparse.Namespace) -> str:
    given = [one for one in (args.text, args.prompt, args.prompt_file) if one is not None]
    if len(given) > 1:
        raise InputError("more than one prompt; give one of PROMPT, -p and -f")
    if given and args.prompt_file is None:
        return str(given[0])
    if not given and sys.stdin.isatty():
        raise InputError('no prompt; give one like "Once upon a time", with -f FILE, or by stdin')
    place = args.prompt_file or "stdin"
    try:
        with args.prompt_file.open(encoding="utf-8") if given else nullcontext(sys.stdin) as file:
            prompt = str(file.read(MAX_PROMPT_CHARS + 1))
    except OSError as error:
        raise InputError(f"{place}: cannot read ({error.strerror}); give another file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{place}: not valid UTF-8 ({error}); give the prompt as UTF-8") from None
    if len(prompt) > MAX_PROMPT_CHARS:
        raise InputError(f"{place}: more than {MAX_PROMPT_CHARS:,} characters; shorten the prompt")
    return prompt


def _stream(model: Model, prompt: str | list[int], params: SamplingParams, *, quiet: bool) -> None:
    try:
        for chunk in model.generate(prompt, params):
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    finally:  # so that Ctrl-C, too, shows the figures of what was generated until then
        if model.stats.prompt_tokens:
            sys.stdout.write("\n")
            sys.stdout.flush()
            if not quiet:
                print(model.stats.line(), file=sys.stderr)


def _print_json(
    model: Model, prompt: str | list[int], params: SamplingParams, *, lines: bool
) -> None:
    """Print one object at the end, or with `lines` one for each chunk and one of figures."""
    chunks = []
    for chunk in model.generate(prompt, params):
        chunks.append(chunk)
        if lines:
            print(json.dumps(asdict(chunk), ensure_ascii=False), flush=True)
    if lines:
        print(json.dumps({"stats": model.stats.to_dict()}))
        return
    result: dict[str, object] = {
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [token for chunk in chunks for token in chunk.token_ids],
        "finish_reason": chunks[-1].finish_reason,
        "stats": model.stats.to_dict(),
    }
    if params.logprobs is not None:
        result["logprobs"] = [asdict(one) for chunk in chunks for one in chunk.logprobs or []]
    print(json.dumps(result, ensure_ascii=False))
