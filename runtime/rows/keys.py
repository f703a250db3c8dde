"""Which rows tokens look up, given the text before them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from stem_edge.config import ModelConfig
from stem_edge.numerics.quantize import I64

# Kernels add up so many products at a time. A mean in two parts would depend on where its step begins.
ADDED_AT_ONCE = 128
# From the tokens of a text, the row ids of their own rows [T], and the first token that is asked for, to
# row ids [T - first], or [T - first, keys].
Keys: TypeAlias = Callable[[I64, I64, int], I64]


@dataclass(frozen=True)
class RowKeys:
    """The rows that tokens look up: by default, each its own."""

    of: Keys = lambda token_ids, row_ids, first: row_ids[first:]
    before: int = 0  # tokens before a step that decide which rows it looks up
    rows_per_token: int = 1  # the last of a token's keys; the others are of tokens before it
    rows_before: int = 0  # rows of tokens before a step that it looks up again
    editable: bool = True  # False if edits cannot change which rows tokens look up
    step_tokens: int = sys.maxsize  # most tokens of a step


def keys_of(config: ModelConfig) -> RowKeys:
    """Keys of a model: of the n-grams that tokens end, of the last tokens of their document, or their own."""
    if config.ngram_order:
        from stem_edge.numerics.ngram_hash import hash_of  # for such models alone

        hashed = hash_of(config)
        return RowKeys(
            lambda token_ids, row_ids, first: hashed.keys(token_ids[first:], token_ids[:first]),
            before=hashed.memory,
            rows_per_token=config.lookups,
            editable=False,
        )
    if not config.row_window:
        return RowKeys()
    from stem_edge.tables.windows import last_rows  # for such models alone

    window, ends, before = config.row_window, config.eos_ids, config.row_window - 1
    return RowKeys(
        lambda token_ids, row_ids, first: last_rows(token_ids, row_ids, first, window, ends),
        before=before,
        rows_before=before,
        step_tokens=max(ADDED_AT_ONCE - before, ADDED_AT_ONCE // 2),
    )
