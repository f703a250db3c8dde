"""Shared parts of commands that generate text: prompt, sampling options, printed answers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stem_edge import sampling
from stem_edge.commands.options.arguments import MORE, read_text
from stem_edge.errors import InputError
from stem_edge.runtime.grammars.grammar import MAX_CHARS, Grammar
from stem_edge.runtime.model import Model
from stem_edge.runtime.sampling_params import RANGES, SamplingOptions, SamplingParams, params_of
from stem_edge.runtime.scheduling.request import Chunk
from stem_edge.runtime.stats import GenerationStats
from stem_edge.text_table import shown_lines

LENGTH = "tokens of an answer at most (default: %d)"
LIKELY = "choose among likely tokens"
FORM = "answers of this form only"


def add_text(add: Callable[..., object], metavar: str, help_text: str) -> None:
    """Declare the prompt as a positional argument and as -p. add: the parser's add_argument."""
    add("text", metavar=metavar, nargs="?", help=help_text)
    add("-p", "--prompt", metavar="TEXT", help="the same, as an option")


def given_text(args: argparse.Namespace) -> str | None:
    """Return the command line's prompt, or None. Raises InputError for two prompts, or for "-"."""
    if args.text is not None and args.prompt is not None:
        raise InputError("more than one prompt; give it by position or with -p")
    found: str | None = args.prompt if args.text is None else args.text
    if found == "-":
        raise InputError("the text is '-', expected words; leave it out, and stdin is read")
    return found


def add_sampling(group: argparse._ArgumentGroup, max_new_tokens: int = 128) -> None:
    """Declare options for the fields of SamplingParams; absent ones get the model's defaults."""
    add = group.add_argument
    number: dict[str, Any] = {"type": float, "metavar": "X"}
    count: dict[str, Any] = {"type": int, "metavar": "N"}
    several: dict[str, Any] = {"action": "append", "default": []}
    length = ("-n", "--max-new-tokens", "--max-tokens", "--predict", "--n-predict", "--num-predict")
    add(*length, **count, default=max_new_tokens, help=LENGTH % max_new_tokens)
    add("--temperature", "--temp", **number, help="0: the most probable token; 1: as trained")
    add("--top-k", **count, help=LIKELY)
    add("--top-p", **number, help=LIKELY)
    add("--min-p", **number, help=LIKELY)
    add("-s", "--seed", **count, help="the same seed gives the same answer")
    add("--stop", **several, metavar="TEXT", help="end before TEXT; may be repeated")
    form = group.add_mutually_exclusive_group()
    form.add_argument("--schema", "--json-schema-file", "-jf", type=Path, metavar="FILE", help=FORM)
    form.add_argument("--grammar", "--grammar-file", type=Path, metavar="FILE", help=FORM)
    add("--repetition-penalty", "--repeat-penalty", **number, help=MORE)
    add("--presence-penalty", **number, default=0.0, help=MORE)
    add("--frequency-penalty", **number, default=0.0, help=MORE)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    return params_of(None, sampling_options(args))


def sampling_options(args: argparse.Namespace) -> SamplingOptions:
    options: SamplingOptions = {"stop": args.stop}
    options.update({name: getattr(args, name) for name in RANGES if name in args})  # type: ignore[typeddict-item]
    for path, name, make in (
        (args.schema, "schema", Grammar.of_schema),
        (args.grammar, "grammar", Grammar.of_text),
    ):
        if path is not None:
            text = read_text(path, name, MAX_CHARS)
            with _file_named(path):
                options["grammar"] = make(text)
    return options


def sampled(params: SamplingParams) -> str:
    """Describe how tokens are sampled, like "greedy" or "temperature 0.7", without neutral values."""
    values = {name: getattr(params, name) for name in sampling.RANGES}
    if not values["temperature"]:
        del values["temperature"], values["top_k"], values["top_p"], values["min_p"]
    told = [f"{n} {value:g}" for n, value in values.items() if value != sampling.NEUTRAL.get(n)]
    return ", ".join(told if params.temperature else ["greedy", *told])


def check_grammar(model: Model, params: SamplingParams, args: argparse.Namespace) -> None:
    """Raise InputError for a grammar that no answer can follow; the error names its file."""
    if params.grammar is not None:
        with _file_named(args.schema or args.grammar):
            model.check_grammar(params.grammar)


@contextmanager
def _file_named(path: Path | None) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}" if path is not None else str(error)) from None


def write_text(text: str) -> None:
    """Write a piece of an answer to stdout at once; on a terminal, escape control characters."""
    sys.stdout.write(shown_lines(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def as_object(chunks: Sequence[Chunk], stats: GenerationStats) -> dict[str, object]:
    """Return an answer as a dict for JSON. chunks: all chunks of the answer, at least one."""
    result: dict[str, object] = {
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [token for chunk in chunks for token in chunk.token_ids],
        "finish_reason": chunks[-1].finish_reason,
        "stats": stats.to_dict(),
    }
    if thoughts := "".join(chunk.thoughts for chunk in chunks):
        result["thoughts"] = thoughts
    return result
