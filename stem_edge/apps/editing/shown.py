"""Describe an edit: what it replaces, and which rows each token looks up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from stem_edge.bundle.edit_files.file import Edit
from stem_edge.bundle.manifest import TOKENIZER
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import InputError
from stem_edge.runtime.lookups.overlay import lookups
from stem_edge.runtime.lookups.spans import tokens_after
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.shown import printable
from stem_edge.text_table import cut

# Text before the source -> description of the place. A word may have different tokens in each place.
PLACES = {" ": "after a space", "": "at the start of a text", "\n": "at the start of a line"}
WIDTH = 24  # columns of a token's text


def show_edit(bundle: Bundle, edit: Edit) -> Iterator[str]:
    layers = f"STEM layers {','.join(map(str, edit.layers))}"
    texts = f"{printable(edit.source)} -> {printable(edit.target)}"
    yield f"{texts}: scheme {edit.scheme}, scope {edit.scope}, {layers}"
    codec, sources = TextCodec(bundle.file(TOKENIZER)), dict[tuple[int, ...], str]()
    for before in PLACES:
        with suppress(InputError):  # a tokenizer may have no tokens for the text in some place
            sources.setdefault(tuple(tokens_after(codec, before, edit.source)), before)
    shortest = min(map(len, sources), default=0)
    for source, before in sources.items():
        if edit.scope == "everywhere" and len(source) > shortest:
            continue  # this scope changes only the shortest split into tokens
        try:
            said = _looked_up(codec, edit, source, before)
        except InputError as error:
            said = f"no fit, so such prompts are refused ({error})"
        yield f"{PLACES[before]}: {said}"


def _looked_up(codec: TextCodec, edit: Edit, source: Sequence[int], before: str) -> str:
    """Describe which table rows each token of the source text looks up. before: text before it."""
    found = lookups(codec, edit, len(source), before)
    pairs = [
        (_names(codec, [token]), _names(codec, each))
        for token, each in zip(source, found, strict=True)
    ]
    return ", ".join(f"{token} looks up {rows}" for token, rows in pairs)


def _names(codec: TextCodec, token_ids: Sequence[int]) -> str:
    names = " and ".join(_quoted(codec, each) for each in token_ids)
    return f"the mean of {names}" if len(token_ids) > 1 else names


def _quoted(codec: TextCodec, token_id: int) -> str:
    """Return a token's text in quotes, cut to WIDTH columns; "token <id>" if it has no text."""
    text = codec.decode([token_id], skip_special_tokens=False)
    if not text or "\N{REPLACEMENT CHARACTER}" in text:
        return f"token {token_id}"
    return cut(repr(text), WIDTH, "...'")
