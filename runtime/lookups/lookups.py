"""Checks token ids from callers, and maps them to row ids. Edits and callers can change the map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.errors import InputError
from stem_edge.numerics.quantize import I64
from stem_edge.shown import shown
from stem_edge.tables.rows import RowLookup

if TYPE_CHECKING:
    from stem_edge.runtime.engine import Engine

MOST_IDS = 1 << 26  # more than any context holds
# The token of the row to look up, or several tokens for the mean of their rows.
StemId: TypeAlias = int | Sequence[int]


def checked_ids(token_ids: Sequence[int], vocab_size: int, where: str = "") -> list[int]:
    """Return token ids as a list. Raises InputError with a message that begins with `where`."""
    ids = _as_list(token_ids, where)
    # Types are checked all at once, because a prompt may have a million ids.
    if set(map(type, ids)) - {int}:
        for place, token_id in enumerate(ids):
            if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer):
                raise InputError(
                    f"{where}token ids must be a flat sequence of integers, but the one at position "
                    f"{place} is {shown(token_id)}; give integers from 0 to {vocab_size - 1}"
                )
        ids = [int(token_id) for token_id in ids]
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        place = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
        raise InputError(
            f"{where}token id {shown(ids[place])} at position {place} is not in 0..{vocab_size - 1}; "
            "give ids of this model's tokenizer"
        )
    return ids


def check_text(config: ModelConfig, ids: list[int], where: str = "") -> None:
    """Raise InputError if an id stands for something other than text, such as an image."""
    for what, number in config.placeholders.items():
        if number in ids:
            raise InputError(
                f"{where}token id {number} at position {ids.index(number)} stands for {shown(what)}, "
                "and this bundle has the text model only; give text alone"
            )


def _as_list(token_ids: object, where: str) -> list[Any]:
    """Convert a sequence or a one-dimensional array to a list, with elements of any type."""
    if isinstance(token_ids, Sequence) and not isinstance(token_ids, str | bytes | bytearray):
        if len(token_ids) > MOST_IDS:  # since listing a huge range would take all memory
            raise InputError(f"{where}{len(token_ids)} token ids; give at most {MOST_IDS}")
        return list(token_ids)
    if hasattr(token_ids, "__array__"):
        array = np.asarray(token_ids)
        if array.ndim == 1:
            ids: list[Any] = array.tolist()
            return ids
    raise InputError(
        f"{where}token ids must be a flat sequence of integers, not {shown(token_ids)}; give a list"
    )


class Changes:
    """The edits in effect for a call. This base class has no edits."""

    of_token: Mapping[int, RowLookup] = {}  # lookups of tokens that differ from their own records

    def of_prompt(self, token_ids: Sequence[int]) -> Mapping[int, RowLookup]:
        """Map positions of a prompt to lookups that differ from the tokens' own rows."""
        return {}


class Lookups:
    """The row ids of one call. Use as a context manager: it makes and releases records of edits.

    given: lookups of the prompt's tokens, which then ignore edits. Raises what Changes.of_prompt raises.
    """

    def __init__(
        self,
        engine: Engine,
        changes: Changes,
        prompt: Sequence[int],
        given: Sequence[RowLookup] | None = None,
    ) -> None:
        self._engine, self._tokens = engine, changes.of_token
        # True if each token of the answer looks up its own row, and no other.
        self.plain = engine.rows.plain and not self._tokens
        # Only for places of the prompt that look up other records than their tokens' own.
        self.places: Mapping[int, RowLookup] = (
            changes.of_prompt(prompt) if given is None else dict(enumerate(given))
        )
        self._made: list[int] = []
        self._of_token: dict[int, int] = {}
        self.prompt = np.array(prompt, np.int64)  # its row ids, once this is entered

    def __enter__(self) -> Self:
        self.prompt[list(self.places)] = self._make(list(self.places.values()))
        return self

    def __exit__(self, *_: object) -> None:
        made, self._made = self._made, []  # so that it may be called again
        self._engine.release(made)

    def of_token(self, token_id: int) -> int:
        """Return the row id of a generated token."""
        lookup = self._tokens.get(token_id)
        if lookup is None:
            return token_id
        if token_id not in self._of_token:
            (self._of_token[token_id],) = self._make([lookup])
        return self._of_token[token_id]

    def after(self, seen: Sequence[int], drafts: Sequence[int] = ()) -> I64:
        """Return the row ids of the last token of `seen` and of the drafts that follow it."""
        rows, last = self._engine.rows, len(seen) - 1
        first = max(0, last - rows.before)
        tokens = [*seen[first:], *drafts]
        own = self.prompt[first:].tolist()
        own += map(self.of_token, tokens[len(own) :])
        return rows.ids(np.array(tokens, np.int64), np.array(own, np.int64), last - first)

    def _make(self, lookups: Sequence[RowLookup]) -> list[int]:
        made: list[int] = self._engine.make(lookups).tolist()
        self._made += made
        return made
