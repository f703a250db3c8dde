"""Explanation of an edit, token by token: how its source is split, and what each token looks up."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from stem_edge.bundle.manifest import TOKENIZER
from stem_edge.bundle.opening import Bundle
from stem_edge.edit_files.file import Edit, NewRows, Replacement
from stem_edge.edit_files.schemes import Lookup, Scheme, choose_scheme
from stem_edge.errors import InputError
from stem_edge.runtime.lookups.overlay import BEFORE, lookups, target_tokens
from stem_edge.runtime.lookups.spans import tokens_after
from stem_edge.runtime.text.codec import REPLACEMENT, TextCodec
from stem_edge.text_table import quoted

LONGEST_TOKEN = 16  # columns


@dataclass(frozen=True)
class Token:
    """Token with its id and its text: None for part of a character."""

    token_id: int
    text: str | None


@dataclass(frozen=True)
class Cut:
    """Way to split source and target after some text, as the tokenizer does."""

    before: str  # text in front of the source
    scheme: Scheme  # "auto" resolved for these lengths
    source: tuple[Token, ...]
    target: tuple[Token, ...]
    # For each token of the source, the tokens that give it their rows, averaged if several.
    looks_up: tuple[tuple[Token, ...], ...]
    problem: str | None = None  # why the scheme does not fit; then looks_up is empty


def cuts(bundle: Bundle, edit: Edit) -> tuple[Cut, ...]:
    """Return the distinct ways to split the source; empty for an edit of new rows.

    For scope everywhere only the ways with the fewest tokens, because an edit leaves the tokens of
    other ways unchanged.
    """
    change, codec = edit.change, TextCodec(bundle.file(TOKENIZER))
    if isinstance(change, NewRows):
        return ()
    found: dict[tuple[int, ...], Cut] = {}
    for before in BEFORE:
        # Not an error, because a tokenizer may be unable to represent the text after some `before`.
        with suppress(InputError):
            source = tokens_after(codec, before, change.source)
            target = target_tokens(codec, change, len(source), before)
            found.setdefault(tuple(source), _cut(codec, change, before, source, target))
    ways = tuple(found.values())
    if edit.scope == "everywhere":
        least = min(map(len, found))
        ways = tuple(cut for cut in ways if len(cut.source) == least)
    return ways


def notes_on(bundle: Bundle, edit: Edit, ways: Sequence[Cut]) -> list[str]:
    """Return warnings: of several tokens that are changed everywhere, and of rare spellings."""
    change, codec = edit.change, TextCodec(bundle.file(TOKENIZER))
    if isinstance(change, NewRows):
        return []
    notes = []
    if edit.scope == "everywhere" and any(len(way.source) > 1 for way in ways):
        tokens = [quoted(t.text, t.token_id, LONGEST_TOKEN) for way in ways for t in way.source]
        notes.append(
            "the source is several tokens, and each of them is changed wherever it occurs, in "
            f"other words and names, too: {', '.join(dict.fromkeys(tokens))}. Scope positions "
            "changes them only where they are together in a prompt."
        )
    for text in (change.source, change.target):
        spellings = dict.fromkeys([text, text.title(), text.capitalize(), text.lower()])
        counts = {each: len(tokens_after(codec, " ", each)) for each in spellings}
        best = min(counts, key=lambda each: counts[each])
        if counts[best] < counts[text]:
            notes.append(
                f"{text!r} is split into {counts[text]} tokens, {best!r} into {counts[best]}: did "
                "you mean that?"
            )
    return notes


def _cut(
    codec: TextCodec,
    change: Replacement,
    before: str,
    source: Sequence[int],
    target: Sequence[int],
) -> Cut:
    looked: list[Lookup] = []
    scheme, problem = change.scheme, None
    try:
        scheme = choose_scheme(scheme, len(source), len(target))
        looked = lookups(codec, change, len(source), before)
    except InputError as error:
        problem = str(error)
    return Cut(
        before,
        scheme,
        _tokens(codec, source),
        _tokens(codec, target),
        tuple(_tokens(codec, each) for each in looked),
        problem,
    )


def _tokens(codec: TextCodec, token_ids: Sequence[int]) -> tuple[Token, ...]:
    return tuple(Token(each, text_of_token(codec, each)) for each in token_ids)


def text_of_token(codec: TextCodec, token_id: int) -> str | None:
    """Return the text of a token; None if it is part of a character or empty."""
    text = codec.decode([token_id], skip_special_tokens=False)
    return text if text and REPLACEMENT not in text else None
