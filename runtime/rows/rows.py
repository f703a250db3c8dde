"""Maps token ids to row ids and row cache slots; for models with tables, see table_rows.py.

A row id names the row that a token looks up: its own token id, or the id of an edit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.errors import InputError
from stem_edge.numerics.quantize import I32, I64
from stem_edge.tables.rows import RowLookup

EMPTY = -1  # stands for no record or slot
# Records to read at a time where they are copied to a larger array, because the memory plan does not
# count a second array of that size. This number of records keeps flash busy.
READ_AT_ONCE = 32
FlashName = Literal["ufs4", "ufs2", "nvme", "emmc", "sdcard"]  # devices of emulated_flash.py
ANY_NUMBER = 1 << 30  # of tokens in a step: no limit
NO_IDS: I64 = np.zeros(0, np.int64)
# Number of products that kernels sum at a time. If a sum were split, its bits would depend on the step's start.
ADDED_AT_ONCE = 128
# (token ids of a text [T], row ids of the tokens' own rows [T], index `first` of the first wanted token) ->
# row ids of the tokens from `first` on: [T - first] or [T - first, keys].
Keys: TypeAlias = Callable[[I64, I64, int], I64]


@dataclass(frozen=True)
class RowCounters:
    """Counts of row cache hits, misses and reads since the model was loaded."""

    hits: int = 0  # uses of records that were in the row cache
    misses: int = 0
    bytes_read: int = 0  # from flash
    stall_seconds: float = 0.0  # time that steps waited for records
    network_bytes: int = 0  # read from remote tables
    network_reads: int = 0  # requests for remote tables

    def __add__(self, more: RowCounters) -> RowCounters:
        pairs = zip(vars(self).values(), vars(more).values(), strict=True)
        return RowCounters(*(one + other for one, other in pairs))


@dataclass(frozen=True)
class RowKeys:
    """How a model maps tokens to rows. By default, each token has its own row.

    of: computes row ids from token ids; None if they are the same. before: number of earlier tokens
    that decide which rows a step looks up. rows_before: number of rows of earlier tokens that a
    step looks up again. editable: edits may change lookups. step_tokens: most tokens of a step.
    """

    of: Keys | None = None
    before: int = 0
    rows_per_token: int = 1  # number of keys of the token itself; keys of earlier tokens come first
    rows_before: int = 0
    editable: bool = True
    step_tokens: int = sys.maxsize


def keys_of(config: ModelConfig) -> RowKeys:
    """Return how a model maps tokens to rows: by n-grams, by a window of tokens, or by token id."""
    if config.ngram_order:
        from stem_edge.numerics.ngram_hash import hash_of  # only for such models

        hashed = hash_of(config)
        return RowKeys(
            lambda token_ids, row_ids, first: hashed.keys(token_ids[first:], token_ids[:first]),
            before=hashed.memory,
            rows_per_token=config.lookups,
            editable=False,
        )
    if not config.row_window:
        return RowKeys()
    from stem_edge.tables.windows import last_rows  # only for such models

    window, ends, before = config.row_window, config.eos_ids, config.row_window - 1
    return RowKeys(
        lambda token_ids, row_ids, first: last_rows(token_ids, row_ids, first, window, ends),
        before=before,
        rows_before=before,
        step_tokens=max(ADDED_AT_ONCE - before, ADDED_AT_ONCE // 2),
    )


class EditRow:
    """A row that edits look up in place of a token's own. The store knows it while a call keeps this object."""

    def __init__(self, lookup: RowLookup, row_id: int) -> None:
        self.lookup, self.row_id = lookup, row_id


class Rows:
    """Rows of a dense model: it has no tables, so nothing is read. Base class of TableRows."""

    def __init__(self, keys: RowKeys | None = None) -> None:
        self._keys = keys or RowKeys()
        self.before = self._keys.before  # tokens before a step that decide which rows it looks up

    @property
    def step_tokens(self) -> int:
        """Largest number of tokens in a step. Dense models read no rows, so they have no limit."""
        return ANY_NUMBER

    @property
    def step_sequences(self) -> int:
        """Largest number of sequences that can decode in one step."""
        return ANY_NUMBER

    def ids(self, token_ids: I64, own: I64 | None = None, first: int = 0) -> I64:
        """Return the row ids of tokens from index `first` on: int64 [T - first] or [T - first, n].

        token_ids [T] begins with the text, or `self.before` tokens before `first`, because n-grams
        and windows depend on them. n: rows per token in such models. own [T]: for each token, the
        id of its own row; default: the token id.
        """
        own, of = token_ids if own is None else own, self._keys.of
        return own[first:] if of is None else of(token_ids, own, first)

    def expect(self, row_ids: I64, later: I64 = NO_IDS) -> None:
        """Start reading rows of the next step that are not cached.

        later: row ids of steps after the next one, which the OS may start to read.
        """

    def slots(self, row_ids: I64) -> I32:
        """Return the row cache slots of row ids, in the same shape, valid until the next call."""
        return np.zeros(len(row_ids), np.int32)

    def make(self, lookups: Sequence[RowLookup]) -> list[EditRow]:
        """Return the rows of edits' lookups. A row id is valid as long as its row is kept. InputError without tables."""
        if lookups:
            raise InputError("this model is dense: it has no rows to edit; load one with tables")
        return []

    def counters(self) -> RowCounters:
        return RowCounters()

    def close(self) -> None:
        """Release threads and files."""
