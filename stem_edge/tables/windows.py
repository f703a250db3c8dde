"""Windowed rows: a token uses the mean of the rows of the last tokens of its document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from stem_edge.numerics.quantize import F32, I32, I64

NOTHING = -1  # row id of positions before the document
Ids = TypeVar("Ids", I32, I64)  # row ids, or row cache slots


def last_rows(token_ids: I64, row_ids: Ids, first: int, window: int, ends: Sequence[int]) -> Ids:
    """Return, for each token from index `first` on, the row ids of its window, oldest first.

    token_ids, row_ids [T]. Result: [T - first, window], -1 before the document. ends: tokens that end documents.
    """
    before, places = window - 1, np.arange(len(token_ids))
    padded = np.concatenate([np.full(before, NOTHING, row_ids.dtype), row_ids])
    rows = np.lib.stride_tricks.sliding_window_view(padded, window)[first:].copy()
    begins = np.append(True, np.isin(token_ids[:-1], ends))
    starts = np.maximum.accumulate(np.where(begins, places, 0))
    ago = np.arange(window)[::-1]
    rows[ago > (places - starts)[first:, None]] = NOTHING
    return rows


def spread(slots: npt.NDArray[np.integer[Any]]) -> tuple[I32, F32]:
    """Convert each token's window of row cache slots, [B, T, window], to one list of slots and weights for each token.

    Returns the slots [B, T + window - 1] of these tokens and of the window - 1 before them, and weights
    [B, T, T + window - 1]: equal and with a sum of 1 for the slots in a token's window, and 0 for all others.
    """
    sequences, count, window = slots.shape
    line = np.concatenate([slots[:, 0, :-1], slots[:, :, -1]], axis=1)
    there = slots != NOTHING
    shares = np.zeros((sequences, count, count + window - 1), np.float32)
    places = np.arange(count)[:, None]
    shares[:, places, places + np.arange(window)] = there / there.sum(axis=-1, keepdims=True)
    return np.maximum(line, 0).astype(np.int32), shares
