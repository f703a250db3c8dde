"""Keys of rows that are means over the last tokens of a document."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stem_edge.numerics.quantize import I64
from stem_edge.runtime.rows.records import RowKeys
from stem_edge.tables.windows import last_rows

# Kernels add up so many products at a time. A mean in two parts would depend on where its step begins.
ADDED_AT_ONCE = 128


class WindowKeys(RowKeys):
    """Rows [T, window] of the last tokens of a document, which a token of `ends` ends."""

    def __init__(self, window: int, ends: Sequence[int]) -> None:
        self._window, self._ends, self.before = window, ends, window - 1
        self.others = self.before
        self.most = max(ADDED_AT_ONCE - self.before, ADDED_AT_ONCE // 2)

    def of(self, token_ids: I64, row_ids: I64, first: int = 0) -> I64:
        return last_rows(token_ids, row_ids, first, self._window, self._ends)


def following(keys: RowKeys, seen: Sequence[int], tokens: Sequence[int]) -> I64:
    """Row ids of tokens that follow a text, without edits."""
    earlier = seen[max(0, len(seen) - keys.before) :]
    text = np.array([*earlier, *tokens], np.int64)
    return keys.of(text, text, len(earlier))
