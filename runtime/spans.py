"""Where a text stands in token ids, and which tokens it is cut into."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from stem_edge.errors import InputError
from stem_edge.runtime.text import REPLACEMENT, TextCodec

CHARACTER_BYTES = 4  # of UTF-8 at most: so many tokens can one character be cut into
NEAR, ALIKE = 5, 0.6  # near matches to name, and how alike they are at least


class Span(NamedTuple):
    """Tokens start..stop-1 hold a text; `before` is what the first of them has in front of it."""

    start: int
    stop: int
    before: str


def text_of(codec: TextCodec, token_ids: Sequence[int]) -> tuple[str, list[int], list[int]]:
    """Text of token ids, special tokens included, and where each token begins and ends in it.

    Tokens that hold a character together have the same begin and end.
    """
    text, starts, ends = "", [], []
    ids, held, at = (
        list(token_ids),
        0,
        0,
    )  # ids from `at` on are in no text yet, from `held` decoded
    for number in range(1, len(ids) + 1):
        before = codec.decode(ids[held:at], skip_special_tokens=False)
        now = codec.decode(ids[held:number], skip_special_tokens=False)
        unfinished = now.endswith(REPLACEMENT) and number - at < CHARACTER_BYTES
        if unfinished and number < len(ids):
            continue
        piece = now[len(before) :]
        starts += [len(text)] * (number - at)
        text += piece
        ends += [len(text)] * (number - at)
        held, at = at, number
    return text, starts, ends


def find_spans(codec: TextCodec, token_ids: Sequence[int], wanted: str) -> list[Span]:
    """Every place of a text among token ids, from left to right, none within a longer word.

    Raises InputError naming what is like it if it is nowhere.
    """
    text, starts, ends = text_of(codec, token_ids)
    spans = []
    for begin in _places(text, wanted):
        end = begin + len(wanted)
        tokens = [n for n, at in enumerate(starts) if at < end and begin < ends[n]]
        before = text[starts[tokens[0]] : begin]
        spans.append(Span(tokens[0], tokens[-1] + 1, before))
    if not spans:
        raise InputError(f"{wanted!r} is not in the prompt {_shown(text)}{_near(text, wanted)}")
    return spans


def tokens_after(codec: TextCodec, before: str, text: str) -> tuple[list[int], list[str]]:
    """Token ids that hold a text where `before` stands in front of it, and the text of each."""
    ids = codec.encode(before + text, add_special_tokens=False)
    whole, starts, ends = text_of(codec, ids)
    # A decoder may drop a space at the beginning.
    begin = whole.find(text)
    if begin < 0:
        raise InputError(
            f"the tokenizer turns {text!r} into {whole!r}; give a text that it can represent"
        )
    held = [n for n in range(len(ids)) if starts[n] < begin + len(text) and begin < ends[n]]
    return [ids[n] for n in held], [whole[starts[n] : ends[n]] for n in held]


def _places(text: str, wanted: str) -> Iterator[int]:
    at = text.find(wanted)
    while at >= 0:
        end = at + len(wanted)
        if _parted(text[at - 1 : at], wanted[0]) and _parted(wanted[-1], text[end : end + 1]):
            yield at
            at = text.find(wanted, end)
        else:
            at = text.find(wanted, at + 1)


def _parted(left: str, right: str) -> bool:
    """Whether a word can end between these characters, of which one may be none."""
    letters = left.isalnum() and right.isalnum()
    # Scripts without upper and lower case do not part words by spaces, or not all of them.
    return not letters or "Lo" in (unicodedata.category(left), unicodedata.category(right))


def _near(text: str, wanted: str) -> str:
    words = text.split()
    count = len(wanted.split())
    phrases = {" ".join(words[at : at + count]).strip(".,;:!?\"'()") for at in range(len(words))}
    by_case = {phrase.casefold(): phrase for phrase in sorted(phrases)}
    found = difflib.get_close_matches(wanted.casefold(), by_case, NEAR, ALIKE)
    if not found:
        return "; check its spelling, or take an edit that holds everywhere (scope everywhere)"
    return f"; near it: {', '.join(repr(by_case[one]) for one in found)}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
