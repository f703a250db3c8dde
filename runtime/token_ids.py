"""Checks token ids from callers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.errors import InputError
from stem_edge.shown import shown

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
    """Raise InputError, prefixed by `where`, if an id stands for an image or other non-text."""
    for what, number in config.placeholders.items():
        if number in ids:
            raise InputError(
                f"{where}token id {number} at position {ids.index(number)} stands for {shown(what)}, "
                "and this bundle has the text model only; give text alone"
            )


def _as_list(token_ids: object, where: str) -> list[Any]:
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
