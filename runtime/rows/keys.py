"""Which rows tokens look up, given the text before them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from stem_edge.config import ModelConfig
from stem_edge.numerics.quantize import I64

# Kernels add up so many products at a time. A mean in two parts would depend on where its step begins.
ADDED_AT_ONCE = 128


class RowKeys:
    """Each token looks up its own row."""

    before = 0  # tokens before a step that decide which rows it looks up
    rows_per_token = 1  # the last of a token's keys; the others are of tokens before it
    rows_before = 0  # rows of tokens before a step that it looks up again
    editable = True  # False if edits cannot change which rows tokens look up
    step_tokens = sys.maxsize  # most tokens of a step

    def of(self, token_ids: I64, row_ids: I64, first: int = 0) -> I64:
        """Row ids that tokens look up, from the `first` on: [T - first] or [T - first, keys].

        token_ids, row_ids [T]: of a text, and of its tokens' own rows. Before the first token must be
        `before` tokens, or the whole text.
        """
        return row_ids[first:]


class NgramKeys(RowKeys):
    """Each token looks up the rows [T, lookups] of the n-grams that it ends."""

    editable = False

    def __init__(self, config: ModelConfig) -> None:
        from stem_edge.numerics.ngram_hash import hash_of  # for such models alone

        self._hash = hash_of(config)
        self.before, self.rows_per_token = self._hash.memory, config.lookups

    def of(self, token_ids: I64, row_ids: I64, first: int = 0) -> I64:
        return self._hash.keys(token_ids[first:], token_ids[:first])


class WindowKeys(RowKeys):
    """Each token looks up the rows [T, window] of the last tokens of its document, itself included."""

    def __init__(self, window: int, ends: Sequence[int]) -> None:
        self._window, self._ends = window, ends
        self.before = self.rows_before = window - 1
        self.step_tokens = max(ADDED_AT_ONCE - self.before, ADDED_AT_ONCE // 2)

    def of(self, token_ids: I64, row_ids: I64, first: int = 0) -> I64:
        from stem_edge.tables.windows import last_rows  # for such models alone

        return last_rows(token_ids, row_ids, first, self._window, self._ends)


def keys_of(config: ModelConfig) -> RowKeys:
    """Keys of a model's rows."""
    if config.ngram_order:
        return NgramKeys(config)
    return WindowKeys(config.row_window, config.eos_ids) if config.row_window else RowKeys()
