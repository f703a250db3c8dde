"""Keys: which rows tokens look up, from the ids so far; and the means of several, as graphs take them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from stem_edge.config import ModelConfig
from stem_edge.numerics.quantize import F32, I32, I64
from stem_edge.runtime.rows.cache import EMPTY

# Kernels add up so many products at a time. A mean in two parts would depend on where its step begins.
ADDED_AT_ONCE = 128
Ids = TypeVar("Ids", I32, I64)  # of rows, or slots in their place


class Keys:
    """What tokens look up, by the text so far; in this base class, each its own row."""

    before = 0  # tokens before a step whose rows it needs, too
    most = sys.maxsize  # tokens of a step

    def of(self, token_ids: I64, row_ids: Ids, first: int = 0) -> Ids:
        """Row ids that tokens [T] of a text look up, from the `first` on: [T - first, ...].

        row_ids [T]: of their own rows. Tokens before the first are as many as `before`, or all.
        """
        return row_ids[first:]

    def following(self, seen: Sequence[int], tokens: Sequence[int]) -> I64:
        """Row ids of tokens that follow a text, without edits."""
        earlier = seen[max(0, len(seen) - self.before) :]
        text = np.array([*earlier, *tokens], np.int64)
        return self.of(text, text, len(earlier))


def keys_of(config: ModelConfig) -> Keys:
    """Return what the tokens of a model look up."""
    return WindowKeys(config.row_window, config.eos_ids) if config.row_window else Keys()


class WindowKeys(Keys):
    """Rows of the last `window` tokens, up to the token after the last of `ends`, or the first of all."""

    def __init__(self, window: int, ends: Sequence[int]) -> None:
        self.before, self._ends = window - 1, np.array(ends, np.int64)
        self.most = max(ADDED_AT_ONCE - self.before, ADDED_AT_ONCE // 2)

    def of(self, token_ids: I64, row_ids: Ids, first: int = 0) -> Ids:
        """Row ids [T - first, window], oldest first; EMPTY where a document has fewer tokens."""
        count, window = len(token_ids), self.before + 1
        if not count:
            return np.empty((0, window), row_ids.dtype)
        padded = np.concatenate([np.full(self.before, EMPTY, row_ids.dtype), row_ids])
        rows = np.lib.stride_tricks.sliding_window_view(padded, window)[first:].copy()
        places = np.arange(count)
        begins = np.append(True, np.isin(token_ids[:-1], self._ends))
        starts = np.maximum.accumulate(np.where(begins, places, 0))
        ago = np.arange(window)[::-1]
        rows[ago > (places - starts)[first:, None]] = EMPTY
        return rows


def spread(slots: npt.NDArray[np.integer[Any]]) -> tuple[I32, F32]:
    """Return slots of consecutive tokens [B, T, window] in a line, and what each is worth to a token.

    They are slots [B, T + window - 1], in the order of the text, and shares [B, T, T + window - 1].
    """
    sequences, count, window = slots.shape
    line = np.concatenate([slots[:, 0, :-1], slots[:, :, -1]], axis=1)
    there = slots != EMPTY
    shares = np.zeros((sequences, count, count + window - 1), np.float32)
    places = np.arange(count)[:, None]
    shares[:, places, places + np.arange(window)] = there / there.sum(axis=-1, keepdims=True)
    return np.maximum(line, 0).astype(np.int32), shares
