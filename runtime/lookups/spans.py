"""Finds which tokens of a prompt contain a text, and tokenizes a text that follows another text."""

from __future__ import annotations

import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from stem_edge.errors import InputError
from stem_edge.runtime.text.codec import TextCodec

# A text, and the start and end of each token in it; both lists ascend.
TokenText: TypeAlias = tuple[str, list[int], list[int]]


class AbsentError(InputError):
    """A text does not occur in a prompt."""


class Span(NamedTuple):
    """Tokens start to stop - 1 contain a text. `before`: what precedes the text in the first token."""

    start: int
    stop: int
    before: str


def text_of(codec: TextCodec, token_ids: Sequence[int]) -> TokenText:
    """Return the text of token ids, with special tokens, and each token's start and end in it.

    A character that is split over several tokens belongs to each of them. A byte that belongs to no
    character becomes a lone surrogate, which no searched text contains.
    """
    pieces = [codec.token_bytes(token_id) for token_id in token_ids]
    text = b"".join(pieces).decode(errors="surrogateescape")
    places = [at for at, char in enumerate(text) for _ in char.encode(errors="surrogateescape")]
    places.append(len(text))
    bounds = [0, *accumulate(map(len, pieces))]
    # sentencepiece puts a space before a text, which decoders drop.
    dropped = _indent(text) - _indent(codec.decode(token_ids, skip_special_tokens=False))
    starts = [max(0, places[at] - dropped) for at in bounds[:-1]]
    ends = [max(0, places[at - 1] + 1 - dropped) if at else 0 for at in bounds[1:]]
    return text[dropped:], starts, ends


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip(" "))


def find_spans(
    codec: TextCodec, token_ids: Sequence[int], wanted: str, placed: TokenText | None = None
) -> list[Span]:
    """Find all occurrences of a text among token ids, left to right, except inside longer words.

    A special token matches only as a whole, because its name is not text. placed: text and
    token bounds of the ids, if known. Raises AbsentError.
    """
    text, starts, ends = placed or text_of(codec, token_ids)
    spans = []
    for begin in _places(text, wanted):
        end = begin + len(wanted)
        first, stop = bisect_right(ends, begin), bisect_left(starts, end)
        partial = [token_ids[first]] if starts[first] < begin else []
        partial += [token_ids[stop - 1]] if end < ends[stop - 1] else []
        if not any(map(codec.is_silent, partial)):
            spans.append(Span(first, stop, text[starts[first] : begin]))
    if not spans:
        text = codec.decode(token_ids)
        raise AbsentError(
            f"{wanted!r} is not in the prompt {text[:60]!r}; check its spelling, or use an edit that applies "
            "everywhere (scope everywhere)"
        )
    return spans


def tokens_after(codec: TextCodec, before: str, text: str) -> list[int]:
    """Return the token ids of `text` after the text `before`. Raises InputError if no tokens stand for it."""
    ids = codec.encode(before + text, add_special_tokens=False)
    whole, starts, ends = text_of(codec, ids)
    # Searched from the end, because a decoder may drop a space at the beginning.
    begin = whole.rfind(text)
    if begin < 0:
        raise InputError(
            f"the tokenizer turns {text!r} into {whole!r}; give a text that it can represent"
        )
    places = zip(ids, starts, ends, strict=True)
    return [token for token, at, end in places if at < begin + len(text) and begin < end]


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
    """True if a word can end between two characters. At an end of the text, one is empty."""
    if unicodedata.category(right or " ").startswith("M"):
        return False  # since an accent or a vowel sign is part of the letter before it
    letters = left.isalnum() and right.isalnum()
    # Letters without case (Lo) may end words, since many of their scripts write no spaces.
    return not letters or "Lo" in (unicodedata.category(left), unicodedata.category(right))
