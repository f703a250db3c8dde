"""What commands that generate text share: options of sampling, answers on stdout, figures."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields

from stem_edge.errors import InputError
from stem_edge.runtime.generation import Chunk
from stem_edge.runtime.sampling import RANGES, SamplingParams
from stem_edge.runtime.stats import GenerationStats
from stem_edge.text_table import shown, shown_lines

MAX_DIGITS = 1000  # a limit, because the time of int() grows faster than the text

TEMPERATURE = (
    "0: the most probable token, 1: as trained (default: 0, but 1 with --top-k, --top-p or --min-p)"
)
MIN_P = "choose among those at least P times as probable as the best (default: 0, all)"

# Field of SamplingParams -> its short option, metavar and help.
SAMPLING = {
    "max_new_tokens": ("-n", "N", "stop after N tokens (default: %(default)s)"),
    "temperature": ("-t", "T", TEMPERATURE),
    "top_k": ("", "K", "choose among the K most probable (default: 0, all)"),
    "top_p": ("", "P", "choose among the most probable that add up to P (default: 1, all)"),
    "min_p": ("", "P", MIN_P),
    "repetition_penalty": ("", "R", "above 1, tokens seen before are less probable (default: 1)"),
    "seed": ("", "S", "the same seed gives the same text"),
    "logprobs": ("", "N", "with JSON: print log probabilities of the N best"),
}


def add_sampling(group: argparse._ArgumentGroup) -> None:
    """Declare the fields of SamplingParams; sampling_params reads them."""
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


def sampling_params(args: argparse.Namespace, as_json: bool) -> SamplingParams:
    """Values of the options of add_sampling. Raises InputError."""
    if args.logprobs is not None and not as_json:
        raise InputError("--logprobs shows in JSON only; add --json")
    return SamplingParams(**{name: getattr(args, name) for name in RANGES}, stop=args.stop)


def whole_number(text: str) -> int:
    """Parse a whole number from the command line, with a short message for a long argument."""
    try:
        if len(text) > MAX_DIGITS:
            raise ValueError
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, found {shown(text)}") from None


def write_text(text: str) -> None:
    """Write a piece of an answer at once; a terminal gets control characters as escapes."""
    sys.stdout.write(shown_lines(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def as_object(chunks: Sequence[Chunk], stats: GenerationStats) -> dict[str, object]:
    """Return an answer of one chunk or more, for JSON."""
    result: dict[str, object] = {
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [token for chunk in chunks for token in chunk.token_ids],
        "finish_reason": chunks[-1].finish_reason,
        "stats": stats.to_dict(),
    }
    if chunks[-1].logprobs is not None:
        result["logprobs"] = [asdict(one) for chunk in chunks for one in chunk.logprobs or []]
    return result


def dim(text: str) -> str:
    """Make a text for stderr pale where it stands between the texts of stdout on a terminal."""
    colours = os.environ.get("NO_COLOR", "") == "" and os.environ.get("TERM") != "dumb"
    if colours and sys.stdout.isatty() and sys.stderr.isatty():
        return f"\033[2m{text}\033[0m"
    return text
