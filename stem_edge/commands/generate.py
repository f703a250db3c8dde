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
from stem_edge.edits.folder import open_edits
from stem_edge.errors import InputError
from stem_edge.runtime import load
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling import RANGES, SamplingParams
from stem_edge.text_table import shown

MAX_PROMPT_CHARS = 64 << 20  # of stdin, which may have no end
MAX_DIGITS = 1000

DESCRIPTION = """\
Continue a text. The new text goes to stdout as it is generated, one line of figures to stderr.
Without a prompt on the command line it is read from stdin."""

EPILOG = """\
examples:
  stem-edge generate model "The capital of France is"
  stem-edge generate model "Once" -n 200 -t 0.8 --top-p 0.95 --seed 1
  stem-edge generate chat_model --chat "What is the capital of Spain?"
  stem-edge generate model --edit spain.edit "The capital of Spain is"
  stem-edge generate model --memory 600MB -f prompt.txt"""

# Number of SamplingParams -> its short option, and what stands in help.
SAMPLING = {
    "max_new_tokens": ("-n", "N", f"stop after N tokens ({SamplingParams.max_new_tokens})"),
    "temperature": (
        "-t",
        "T",
        "0: the most probable token, 1: as trained (0, or 1 with --top-k, --top-p or --min-p)",
    ),
    "top_k": ("", "K", "keep the K best (0: all)"),
    "top_p": ("", "P", "keep the best that reach probability P together (1: all)"),
    "min_p": ("", "P", "keep those at least P times as probable as the best (0: all)"),
    "repetition_penalty": ("", "R", "above 1 makes tokens seen before less probable (1)"),
    "seed": ("", "S", "the same seed gives the same text"),
    "logprobs": ("", "N", "with --json or --json-lines: log probabilities of the N best"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument("bundle", metavar="BUNDLE", help="folder that stem-edge export wrote")
    parser.add_argument("text", metavar="PROMPT", nargs="?", help="text to continue")
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the same, as an option")
    parser.add_argument(
        "-f", "--prompt-file", type=Path, metavar="FILE", help="continue the text in this file"
    )
    parser.add_argument(
        "--edit",
        action="append",
        metavar="FILE",
        default=[],
        help="an edit of stem-edge edit, given as a file or by its name; may be given again, "
        "stacked in order",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is what a user says to a chat model: put it into the bundle's chat template",
    )
    parser.add_argument(
        "--special-tokens",
        dest="special_tokens_in_text",
        action="store_true",
        help="names of special tokens in the prompt mean these tokens; by default they are text",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object at the end")
    form.add_argument(
        "--json-lines", action="store_true", help="print a JSON object for each piece of text"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="print no line of figures")
    _add_sampling(parser.add_argument_group("choosing tokens"))
    add_loading(parser.add_argument_group("the machine"))


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
        help="end before this text (may be given several times)",
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
    """Of the command line; a short message also for a long argument."""
    try:
        if len(text) > MAX_DIGITS:
            raise ValueError
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, found {shown(text)}") from None


def _prompt_ids(model: Model, prompt: str, chat: bool, special_tokens: bool) -> str | list[int]:
    """What to continue: the text, or ids where names of special tokens mean these tokens."""
    if chat:
        messages = [{"role": "user", "content": prompt}]
        prompt = model.chat_prompt(messages, special_tokens_in_text=special_tokens)
        # The template has put there what stands at the beginning.
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
    finally:  # also after Ctrl-C: what was generated until then took its time, too
        if model.stats.prompt_tokens:
            sys.stdout.write("\n")
            sys.stdout.flush()
            if not quiet:
                print(model.stats.line(), file=sys.stderr)


def _print_json(
    model: Model, prompt: str | list[int], params: SamplingParams, *, lines: bool
) -> None:
    """One object; or `lines`: one for each chunk, and one with the figures."""
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
