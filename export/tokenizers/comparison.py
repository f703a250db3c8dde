"""Comparison of a converted tokenizer with its original, on texts of all kinds.

A token's id chooses its row, so a bundle with a tokenizer that gives other ids than the trainer's
would run, and be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import tokenizers
from tokenizers import Encoding, Tokenizer

from stem_edge.errors import CheckpointError

TEXTS: tuple[str, ...] = tuple(
    json.loads(Path(__file__).with_name("texts.json").read_text("utf-8"))
)
MOST_NAMES = 256  # of added tokens in one text
SHOWN = 8  # ids in an error
Encode: TypeAlias = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Conversion:
    """A tokenizer of the tokenizers library, and what its original makes of a text."""

    tokenizer: Tokenizer
    as_text: Encode  # names of special tokens are ordinary text
    bos: str | None
    eos: str | None
    as_names: Encode | None = None  # names of special tokens are these tokens; None: never


def encode(tokenizer: Tokenizer, as_text: bool, text: str) -> list[int]:
    """Encode with names of special tokens as ordinary text, or as these tokens."""
    tokenizer.encode_special_tokens = as_text
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def compare(path: Path, original: Conversion, written: bytes, template: object) -> None:
    """Raise CheckpointError if the tokenizer.json `written` reads a text other than its original.

    path: the original's file; template: of its chats, which holds the names that they need.
    """
    tokenizer = Tokenizer.from_buffer(written)
    texts = list(_texts(original.tokenizer, template))
    readings = [(True, original.as_text)]
    if original.as_names is not None:
        readings.append((False, original.as_names))
    for as_text, original_ids in readings:
        tokenizer.encode_special_tokens = as_text
        for text in texts:
            found = tokenizer.encode(text, add_special_tokens=False)
            expected = list(original_ids(text))
            if found.ids != expected:
                raise CheckpointError(
                    f"{path}: {_difference(text, found, expected)}; give a tokenizer.json of the "
                    "model with --tokenizer, or install another version of tokenizers (this is "
                    f"{tokenizers.__version__})"
                )
        tokenizer.decode(tokenizer.encode(" ".join(TEXTS)).ids)  # since some damage shows in use


def _texts(tokenizer: Tokenizer, template: object) -> Iterator[str]:
    names = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    yield from TEXTS
    yield "a" + " b".join(names[:MOST_NAMES])
    if isinstance(template, str):
        yield template


def _difference(text: str, found: Encoding, expected: list[int]) -> str:
    """Describe where ids differ first. found: an Encoding, which knows the text of each id."""
    same = (a == b for a, b in zip(found.ids, expected, strict=False))
    at = next((k for k, equal in enumerate(same) if not equal), min(len(found.ids), len(expected)))
    start = found.offsets[at][0] if at < len(found.ids) else len(text)
    ids = f"{expected[at : at + SHOWN]}, found {found.ids[at : at + SHOWN]}"
    return (
        f"the converted tokenizer reads {text[start : start + 20]!r} after "
        f"{text[max(0, start - 20) : start]!r} other than the original: expected ids {ids}"
    )
