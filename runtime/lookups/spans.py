"""Where a text stands in token ids, and which tokens it is cut into."""

from __future__ import annotations

import difflib
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from stem_edge.errors import InputError
from stem_edge.runtime.text.codec import REPLACEMENT, TextCodec, same_start

# Tokens that are decoded together at most while their text ends with half a character, or with what
# looks like it: mostly one character is cut into 4 tokens at most.
TOGETHER = 32
NEAR, ALIKE = 5, 0.6  # near matches to name, and how alike they are at least
# Phrases and their length up to which those are looked for; long ones take 0.2 ms each.
COMPARED, COMPARED_LENGTH = 2000, 100


# A text, and where each token begins and ends in it; both lists ascend.
TokenText: TypeAlias = tuple[str, list[int], list[int]]


class AbsentError(InputError):
    """A text is nowhere in a prompt."""


class Span(NamedTuple):
    """Tokens start..stop-1 hold a text; `before` is what the first of them has in front of it."""

    start: int
    stop: int
    before: str


def text_of(codec: TextCodec, token_ids: Sequence[int]) -> TokenText:
    """Text of token ids, special tokens included, and where each token begins and ends in it.

    A character that is cut over several tokens belongs to each of them. Both lists ascend.
    """
    text, starts, ends = "", list[int](), list[int]()
    ids, held, at = list(token_ids), 0, 0  # ids from `at` on are in no text yet
    # Decoded behind the ids before them, as TokenStream does: none of `at` on, one, two...
    decoded = [""]
    for number in range(1, len(ids) + 1):
        decoded.append(codec.decode(ids[held:number], skip_special_tokens=False))
        unfinished = decoded[-1].endswith(REPLACEMENT) and number - at < TOGETHER
        if unfinished and number < len(ids):
            continue
        behind = len(text) - len(decoded[0])
        for start, end in _places_in(decoded):
            starts.append(behind + start)
            ends.append(behind + end)
        text += decoded[-1][len(decoded[0]) :]
        held, at = at, number
        decoded = [codec.decode(ids[held:at], skip_special_tokens=False)]
    return text, starts, ends


def _places_in(decoded: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Where each token begins and ends in decoded[-1], of texts with none of them, one, two...

    A token is in a character until the text shows it, which it does not take back.
    """
    text, first = decoded[-1], len(decoded[0])
    begin = last = first  # what is shown of the text, and the end of the last token's
    for piece in decoded[1:]:
        shown = max(begin, same_start(piece, text))
        end = shown if text.startswith(piece) else min(shown + 1, len(text))
        # U+FFFD that stays is a character of the text, or bytes that are none: more of the same.
        more = first < last <= begin == shown and text[begin - 1] == REPLACEMENT
        if more and end < len(text):
            start, end = begin - 1, begin
        else:
            start = begin
        yield start, max(last, end)
        begin, last = shown, max(last, end)


def find_spans(
    codec: TextCodec, token_ids: Sequence[int], wanted: str, placed: TokenText | None = None
) -> list[Span]:
    """Every place of a text among token ids, from left to right, none within a longer word.

    Nor within a special token, which is no text: only as a whole. Raises AbsentError naming what
    is like it if it is nowhere. placed: text_of the ids, where it is known.
    """
    text, starts, ends = placed or text_of(codec, token_ids)
    spans = []
    for begin in _places(text, wanted):
        end = begin + len(wanted)
        first, stop = bisect_right(ends, begin), bisect_left(starts, end)
        cut = [token_ids[first]] if starts[first] < begin else []
        cut += [token_ids[stop - 1]] if end < ends[stop - 1] else []
        if not any(_is_special(codec, token) for token in cut):
            spans.append(Span(first, stop, text[starts[first] : begin]))
    if not spans:
        text = codec.decode(token_ids)
        raise AbsentError(f"{wanted!r} is not in the prompt {_shown(text)}{_near(text, wanted)}")
    return spans


def _is_special(codec: TextCodec, token_id: int) -> bool:
    shown, hidden = (codec.decode([token_id], skip_special_tokens=skip) for skip in (False, True))
    return bool(shown) and not hidden


def tokens_after(codec: TextCodec, before: str, text: str) -> list[int]:
    """Token ids that hold a text where `before` stands in front of it. Raises InputError."""
    ids = codec.encode(before + text, add_special_tokens=False)
    whole, starts, ends = text_of(codec, ids)
    # Counted from the end: a decoder may drop a space at the beginning.
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
    """Whether a word can end between these characters, of which one may be none."""
    if unicodedata.category(right or " ").startswith("M"):
        return False  # an accent or a vowel sign is part of the letter before it
    letters = left.isalnum() and right.isalnum()
    # Scripts without upper and lower case do not part words by spaces, or not all of them.
    return not letters or "Lo" in (unicodedata.category(left), unicodedata.category(right))


def _near(text: str, wanted: str) -> str:
    words = text.split() if len(wanted) <= COMPARED_LENGTH else []
    count, by_case = len(wanted.split()), dict[str, str]()
    for at in range(len(words)):
        phrase = " ".join(words[at : at + count]).strip(".,;:!?\"'()")
        if len(by_case) < COMPARED:
            by_case.setdefault(phrase.casefold(), phrase)
    found = difflib.get_close_matches(wanted.casefold(), by_case, NEAR, ALIKE)
    if not found:
        return "; check its spelling, or take an edit that holds everywhere (scope everywhere)"
    return f"; near it: {', '.join(repr(by_case[one]) for one in found)}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
