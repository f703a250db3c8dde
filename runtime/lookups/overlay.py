"""Converts edits to maps from tokens, and from positions of a prompt, to the rows to look up.

Edits are stacked in order. An edit always copies the bundle's original rows, not rows of other edits,
so that two edits can exchange two tokens. Where two edits change the same row (the same position or
token, in the same layer), the later edit wins. Edits do not change lookups of a caller's stem_ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from stem_edge.bundle.edit_files.file import Edit
from stem_edge.bundle.edit_files.schemes import align, fits
from stem_edge.config import ModelConfig
from stem_edge.errors import InputError
from stem_edge.runtime.lookups.spans import (
    AbsentError,
    TokenText,
    find_spans,
    text_of,
    tokens_after,
)
from stem_edge.runtime.text.codec import TextCodec
from stem_edge.runtime.token_ids import StemId, checked_ids
from stem_edge.tables.composing import tokens_of
from stem_edge.tables.rows import Row, RowLookup


def given_lookups(config: ModelConfig, stem_ids: Sequence[StemId], length: int) -> list[RowLookup]:
    """Return the rows that each token looks up: those of its `stem_ids`. Raises InputError."""
    if not isinstance(stem_ids, Sequence | np.ndarray):
        raise InputError("stem_ids must be a sequence; give one id, or several, for each token")
    if len(stem_ids) != length:
        raise InputError(f"{len(stem_ids)} stem_ids for {length} tokens; give one for each")
    layers = len(config.stem_layers)
    lookups = list[RowLookup]()
    for position, stem_id in enumerate(stem_ids):
        several = stem_id if isinstance(stem_id, Sequence | np.ndarray) else [stem_id]
        ids = checked_ids(several, config.vocab_size, f"stem_ids[{position}]: ")
        if not ids:
            raise InputError(f"stem_ids: none at position {position}; give at least one id")
        lookups.append((tuple(ids),) * layers)
        if layers:
            check_lookup(config, lookups[-1])
    return lookups


def check_lookup(config: ModelConfig, lookup: RowLookup) -> None:
    """Raise InputError if a token has no row, or if a lookup averages rows that are experts."""
    greatest = max(tokens_of(lookup), default=0)
    if greatest >= config.vocab_size:
        raise InputError(
            f"token {greatest} has no row, because the tokenizer has tokens that the model lacks; "
            f"expected 0 to {config.vocab_size - 1}: use another text"
        )
    if config.n_experts and any(len(set(row)) > 1 for row in lookup):
        raise InputError(
            "the rows of this model are experts, and a mean of experts is not an expert; let each "
            "token look up a single row (a scheme other than average)"
        )


# A source is tokenized after each of these texts, because no prompt says what precedes it. If they lead
# to different rows for a token, the first text wins.
BEFORE = (" ", "", "\n")
ByLayer: TypeAlias = dict[int, Row]  # STEM layer -> row looked up there


class Overlay:
    """An immutable stack of edits on a bundle: which tokens look up which other tokens' rows.

    Raises InputError for an edit that cannot be applied.
    """

    def __init__(self, codec: TextCodec, config: ModelConfig, edits: Sequence[Edit]) -> None:
        self.edits, self._codec, self._config = tuple(edits), codec, config
        self._everywhere = [everywhere(codec, edit) for edit in self.edits]
        tokens = sorted(set().union(*self._everywhere))
        self.of_token: dict[int, RowLookup] = {
            token: self._lookup(token, [found.get(token, {}) for found in self._everywhere])
            for token in tokens
        }

    def of_prompt(self, token_ids: Sequence[int]) -> dict[int, RowLookup]:
        """Return position -> lookup for the tokens of a prompt that do not look up their own rows.

        Raises InputError if some edits have scope "positions" and the prompt contains no source text of these edits.
        """
        placed = self._placed(token_ids)
        places = enumerate(token_ids)
        found = {at: self.of_token[token] for at, token in places if token in self.of_token}
        for place in set().union(*placed):
            token = token_ids[place]
            changes = [
                of_token.get(token, {}) | of_place.get(place, {})
                for of_token, of_place in zip(self._everywhere, placed, strict=True)
            ]
            found[place] = self._lookup(token, changes)
        return found

    def _placed(self, token_ids: Sequence[int]) -> list[dict[int, ByLayer]]:
        """Return, for each edit, a map from positions of a prompt to the rows that the edit sets there."""
        placed: list[dict[int, ByLayer]] = []
        absent: list[AbsentError] = []
        text = None
        if any(edit.scope == "positions" for edit in self.edits):
            text = text_of(self._codec, token_ids)
        for edit in self.edits:
            try:
                placed.append(at_positions(self._codec, edit, token_ids, text))
            except AbsentError as error:  # allowed, because a prompt need not match all edits
                placed.append({})
                absent.append(error)
        if absent and len(absent) == sum(edit.scope == "positions" for edit in self.edits):
            raise absent[0]
        return placed

    def _lookup(self, token: int, changes: Sequence[Mapping[int, Row]]) -> RowLookup:
        rows: ByLayer = dict.fromkeys(self._config.stem_layers, (token,))
        for change in changes:
            rows.update(change)
        lookup = tuple(rows[layer] for layer in self._config.stem_layers)
        check_lookup(self._config, lookup)
        return lookup


def everywhere(codec: TextCodec, edit: Edit) -> dict[int, ByLayer]:
    """Return token id -> table rows that this token looks up everywhere because of an edit.

    Empty for edits with scope "positions". A text can be split into tokens in several ways, for example with
    a space before it. Only the ways with the fewest tokens are used: longer ones consist of word pieces, which
    are in other words, too. Raises InputError if one token would have to look up two different rows.
    """
    if edit.scope != "everywhere":
        return {}
    sources = {before: tokens_after(codec, before, edit.source) for before in BEFORE}
    least = min(map(len, sources.values()))
    found: dict[int, Row] = {}
    for before, source in sources.items():
        if len(source) == least:
            found = _of_tokens(edit, source, lookups(codec, edit, least, before)) | found
    return {token: dict.fromkeys(edit.layers, lookup) for token, lookup in found.items()}


def _of_tokens(edit: Edit, source: Sequence[int], found: Sequence[Row]) -> dict[int, Row]:
    of_token: dict[int, Row] = {}
    for token, lookup in zip(source, found, strict=True):
        if of_token.setdefault(token, lookup) != lookup:
            raise InputError(
                f"token {token} is in {edit.source!r} twice and would look up two things; use "
                "scope positions, or scheme average"
            )
    return of_token


def at_positions(
    codec: TextCodec, edit: Edit, token_ids: Sequence[int], text: TokenText | None
) -> dict[int, ByLayer]:
    """Return token position in a prompt -> table rows that the token looks up because of an edit.

    Empty for edits with scope "everywhere". Raises AbsentError if the edit's source text is not in the prompt.
    text: the prompt as text, with the place of each token.
    """
    if edit.scope != "positions":
        return {}
    found: dict[int, ByLayer] = {}
    # Cached, because a prompt may contain the source a thousand times.
    known: dict[tuple[int, str], list[Row]] = {}  # (tokens of the source, text before it)
    for start, stop, before in find_spans(codec, token_ids, edit.source, text):
        key = (stop - start, before)
        if key not in known:
            known[key] = lookups(codec, edit, *key)
        for place, lookup in enumerate(known[key], start):
            found[place] = dict.fromkeys(edit.layers, lookup)
    return found


def lookups(codec: TextCodec, edit: Edit, length: int, before: str) -> list[Row]:
    """Return the rows that the `length` tokens of the source text look up, if `before` precedes it.

    The target text is tokenized after `before`, and after a space. The shorter result that the scheme allows is
    used, because models know a name better by one whole token than by pieces that other names share.
    """
    candidates = [tokens_after(codec, text, edit.target) for text in (before, " ")]
    candidates.sort(key=len)
    fitting = (ids for ids in candidates if fits(edit.scheme, length, len(ids)))
    return align(edit.scheme, length, next(fitting, candidates[0]), pad=edit.pad)
