"""Row ids of one call whose tokens look up other tokens' rows: by edits, or by its stem_ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from stem_edge.numerics.quantize import I64
from stem_edge.runtime.engine import Engine
from stem_edge.runtime.lookups.overlay import Overlay
from stem_edge.runtime.rows.rows import EditRow
from stem_edge.tables.rows import RowLookup


class Lookups:
    """Table rows that the tokens of one generate call look up, as row ids.

    Row ids of edits are valid while this object exists. changes: the edits in effect. given: rows that the
    caller chose for the prompt's tokens (stem_ids); edits then apply only to generated tokens. Raises
    InputError if the prompt does not contain the source text of an edit.
    """

    def __init__(
        self,
        engine: Engine,
        changes: Overlay | None,
        prompt: Sequence[int],
        given: Sequence[RowLookup] | None,
    ) -> None:
        self._engine = engine
        self._tokens = {} if changes is None else changes.of_token
        # Position in the prompt -> lookup, for tokens that do not look up their own rows.
        self.places: Mapping[int, RowLookup] = {}
        if given is not None:
            self.places = dict(enumerate(given))
        elif changes is not None:
            self.places = changes.of_prompt(prompt)
        self._prompt = prompt
        self._made: list[EditRow] = []  # which keeps their ids valid
        self._of_token: dict[int, int] = {}

    @cached_property
    def prompt(self) -> I64:
        """Row ids of the prompt's tokens."""
        ids = np.array(self._prompt, np.int64)
        ids[list(self.places)] = self._make(list(self.places.values()))
        return ids

    def row_ids(self, token_ids: Sequence[int], first: int) -> I64:
        """Return the row ids of token_ids, which begin at index `first` of prompt and answer."""
        prompt = self.prompt[first:].tolist()
        return np.array([*prompt, *map(self._row_id, token_ids[len(prompt) :])], np.int64)

    def _row_id(self, token_id: int) -> int:
        lookup = self._tokens.get(token_id)
        if lookup is None:
            return token_id
        if token_id not in self._of_token:
            (self._of_token[token_id],) = self._make([lookup])
        return self._of_token[token_id]

    def _make(self, lookups: Sequence[RowLookup]) -> list[int]:
        made = self._engine.make(lookups)
        self._made += made
        return [row.row_id for row in made]
