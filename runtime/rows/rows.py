"""Rows of a model: which rows tokens look up, and their slots in the row cache.

`expect(ids)` starts reading what a later step lacks; `slots(ids)` returns the slots of a step. Row ids say
which rows tokens look up: a token's own id, or one that stands for an edit. Only `Rows` and the store know
how they become record numbers; engine and backend know tokens and slots. Here are the rows of dense models,
which have none; table_rows.py has those of tables.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from stem_edge.config import ModelConfig
from stem_edge.errors import InputError
from stem_edge.numerics.quantize import I32, I64
from stem_edge.tables.rows import RowLookup

Flags: TypeAlias = npt.NDArray[np.bool_]
EMPTY = -1  # in place of a record or a slot: none
# Where records from two sources meet in one array, it is filled in parts of this size, because the
# memory plan does not count a second array. That many records keep flash busy.
READ_AT_ONCE = 32
ANY_NUMBER = 1 << 30  # of tokens in a step: no limit
NO_IDS: I64 = np.zeros(0, np.int64)
# Kernels add up so many products at a time. A mean in two parts would depend on where its step begins.
ADDED_AT_ONCE = 128
# From the tokens of a text, the row ids of their own rows [T], and the first token that is asked for, to
# row ids [T - first], or [T - first, keys].
Keys: TypeAlias = Callable[[I64, I64, int], I64]


class Missing(NamedTuple):
    """Records to read."""

    numbers: I64  # [n], distinct and ascending
    whole: Flags  # [n], False where the rows that prompts need are enough


@dataclass(frozen=True)
class RowCounters:
    """Counts since the model was loaded."""

    hits: int = 0  # uses of records that were in the row cache
    misses: int = 0
    bytes_read: int = 0  # from flash
    stall_seconds: float = 0.0  # time that steps waited for records
    network_bytes: int = 0  # of tables on another machine
    network_reads: int = 0  # requests for them

    def __add__(self, more: RowCounters) -> RowCounters:
        pairs = zip(vars(self).values(), vars(more).values(), strict=True)
        return RowCounters(*(one + other for one, other in pairs))


@dataclass(frozen=True)
class RowKeys:
    """The rows that tokens look up: by default, each its own."""

    of: Keys | None = None
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


class Rows:
    """Rows of a dense model, which has none."""

    def __init__(self, keys: RowKeys | None = None) -> None:
        self._keys = keys or RowKeys()
        self.before = self._keys.before  # tokens before a step that decide which rows it looks up
        self.plain = self._keys.of is None  # without edits, each token looks up its own row alone

    @property
    def step_tokens(self) -> int:
        """Most tokens of a step, whichever they are."""
        return ANY_NUMBER

    @property
    def step_sequences(self) -> int:
        """Most sequences that can decode in one step."""
        return ANY_NUMBER

    def ids(self, token_ids: I64, own: I64 | None = None, first: int = 0) -> I64:
        """Row ids that tokens of a text look up, from the `first` on: [T - first] or [T - first, keys].

        own [T]: row ids of the tokens' own rows; default: the token ids. Before the first token must be
        `before` tokens, or the whole text.
        """
        own, of = token_ids if own is None else own, self._keys.of
        return own[first:] if of is None else of(token_ids, own, first)

    def expect(self, row_ids: I64, last: int | None = None, later: I64 = NO_IDS) -> None:
        """Start reading what the cache lacks for the next step; arguments as for `slots`.

        later: row ids of steps that follow it, which the system may begin to read.
        """

    def slots(self, row_ids: I64, last: int | None = None) -> I32:
        """Slots of row ids, in the same shape; they stay valid until the next call.

        last: of how many of the last tokens all rows are needed, and not only those that each token of
        a prompt needs (ModelConfig.prompt_rows). Default: of all.
        """
        return np.zeros(len(row_ids), np.int32)

    def make(self, lookups: Sequence[RowLookup]) -> I64:
        """Row ids int64 [n] that stand for lookups [n] until released. Raises InputError."""
        if lookups:
            raise InputError("this model is dense: it has no rows to edit; load one with tables")
        return NO_IDS

    def release(self, row_ids: Sequence[int]) -> None:
        """Give back row ids from `make`; safe in any thread."""

    def counters(self) -> RowCounters:
        """Counts since loading."""
        return RowCounters()

    def close(self) -> None:
        """Release threads and files."""
