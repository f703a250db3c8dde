"""What the tokens of a call look up: their own records, unless edits or the caller change that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np

from stem_edge.tables.lookup import RowLookup

if TYPE_CHECKING:
    from stem_edge.runtime.engine import Engine


class Changes:
    """Edits in effect; this base class has none."""

    of_token: Mapping[int, RowLookup] = {}  # lookups of tokens that differ from their own records

    def of_prompt(self, token_ids: Sequence[int]) -> Mapping[int, RowLookup]:
        """Return lookups at places of a prompt, where they differ from the tokens' own records."""
        return {}


class Lookups:
    """Stem ids of one call; as a context manager, it owns the records made for them.

    given: lookups of the prompt's tokens, which then ignore edits. Raises as Changes.of_prompt.
    """

    def __init__(
        self,
        engine: Engine,
        changes: Changes,
        prompt: Sequence[int],
        given: Sequence[RowLookup] | None = None,
    ) -> None:
        self._engine, self._tokens = engine, changes.of_token
        # At places of the prompt whose lookups are not their tokens' own records.
        self.places: Mapping[int, RowLookup] = (
            changes.of_prompt(prompt) if given is None else dict(enumerate(given))
        )
        self._made: list[int] = []
        self._of_token: dict[int, int] = {}
        self.prompt = np.array(prompt, np.int64)  # its stem ids, once this is entered

    def __enter__(self) -> Self:
        self.prompt[list(self.places)] = self._make(list(self.places.values()))
        return self

    def __exit__(self, *_: object) -> None:
        made, self._made = self._made, []  # so that it may be called again
        self._engine.release(made)

    def of_token(self, token_id: int) -> int:
        """Stem id of a generated token."""
        lookup = self._tokens.get(token_id)
        if lookup is None:
            return token_id
        if token_id not in self._of_token:
            (self._of_token[token_id],) = self._make([lookup])
        return self._of_token[token_id]

    def _make(self, lookups: Sequence[RowLookup]) -> list[int]:
        made: list[int] = self._engine.make(lookups).tolist()
        self._made += made
        return made
