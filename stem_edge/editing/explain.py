"""What an edit does, token by token: how its source is cut, and what each token looks up."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from stem_edge.bundle.manifest import TOKENIZER, Bundle
from stem_edge.edits.file import Edit, NewRows, Replacement
from stem_edge.edits.schemes import Lookup, Scheme, choose_scheme
from stem_edge.errors import InputError
from stem_edge.runtime.lookups.overlay import BEFORE, lookups, target_tokens
from stem_edge.runtime.lookups.spans import tokens_after
from stem_edge.runtime.text.codec import REPLACEMENT, TextCodec
from stem_edge.text_table import quoted

LONGEST_TOKEN = 16  # columns


@dataclass(frozen=True)
class Token:
    """A token by its id and its text, which is None for a piece of a character."""

    token_id: int
    text: str | None


@dataclass(frozen=True)
class Cut:
    """One way in which source and target are cut into tokens."""

    before: str  # what stands in front of the source
    scheme: Scheme  # what "auto" stands for here
    source: tuple[Token, ...]
    target: tuple[Token, ...]
    # Of each token of the source: whose rows it looks up, the mean of several.
    looks_up: tuple[tuple[Token, ...], ...]
    problem: str | None = None  # why the scheme is not for these lengths; nothing is looked up


def cuts(bundle: Bundle, edit: Edit) -> tuple[Cut, ...]:
    """The ways in which the source is cut, each once; none for an edit of new rows.

    Of an edit everywhere, those of the fewest tokens only: pieces of the others are not changed.
    """
    change, codec = edit.change, TextCodec(bundle.file(TOKENIZER))
    if isinstance(change, NewRows):
        return ()
    found: dict[tuple[int, ...], Cut] = {}
    for before in BEFORE:
        with suppress(InputError):  # a tokenizer may not have them behind every `before`
            source = tokens_after(codec, before, change.source)
            target = target_tokens(codec, change, len(source), before)
            found.setdefault(tuple(source), _cut(codec, change, before, source, target))
    ways = tuple(found.values())
    if edit.scope == "everywhere":
        least = min(map(len, found))
        ways = tuple(cut for cut in ways if len(cut.source) == least)
    return ways


def notes_on(bundle: Bundle, edit: Edit, ways: Sequence[Cut]) -> list[str]:
    """What to know of an edit everywhere that is several tokens, and of rare spellings."""
    change, codec = edit.change, TextCodec(bundle.file(TOKENIZER))
    if isinstance(change, NewRows):
        return []
    notes = []
    if edit.scope == "everywhere" and any(len(way.source) > 1 for way in ways):
        tokens = [quoted(one.text, one.token_id, LONGEST_TOKEN) for w in ways for one in w.source]
        notes.append(
            "the source is several tokens, and each of them is changed wherever it comes, in other "
            f"words and names, too: {', '.join(dict.fromkeys(tokens))}. Scope positions changes "
            "them only where they stand together in a prompt."
        )
    for text in (change.source, change.target):
        spellings = dict.fromkeys([text, text.title(), text.capitalize(), text.lower()])
        counts = {each: len(tokens_after(codec, " ", each)) for each in spellings}
        best = min(counts, key=lambda each: counts[each])
        if counts[best] < counts[text]:
            notes.append(
                f"{text!r} is cut into {counts[text]} tokens, {best!r} into {counts[best]}: did "
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
    """Text of one token, or None if it is a piece of a character or none at all."""
    text = codec.decode([token_id], skip_special_tokens=False)
    return text if text and REPLACEMENT not in text else None
