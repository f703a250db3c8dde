"""Token ids and stem ids as callers give them: checked, and what stem ids look up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.errors import InputError
from stem_edge.tables.lookup import RowLookup, plain, tokens_of
from stem_edge.text_table import shown

MOST_IDS = 1 << 26  # more than any context holds
# The token whose row is looked up, or several for their mean.
StemId: TypeAlias = int | Sequence[int]


def checked_ids(token_ids: Sequence[int], vocab_size: int, where: str = "") -> list[int]:
    """Token ids as a list. Raises InputError, which begins with `where`."""
    ids = _as_list(token_ids, where)
    # Asked for once for all: a prompt may have a million of them.
    if set(map(type, ids)) - {int}:
        for place, one in enumerate(ids):
            if isinstance(one, bool) or not isinstance(one, int | np.integer):
                raise InputError(
                    f"{where}token ids must be a flat sequence of integers, but at position {place} "
                    f"is {shown(one)}; give integers from 0 to {vocab_size - 1}"
                )
        ids = [int(one) for one in ids]
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        place = next(i for i, one in enumerate(ids) if not 0 <= one < vocab_size)
        raise InputError(
            f"{where}token id {shown(ids[place])} at position {place} is not in 0..{vocab_size - 1}; "
            "give ids of this model's tokenizer"
        )
    return ids


def check_text(config: ModelConfig, ids: list[int]) -> None:
    """Raises InputError for ids that stand for what is no text: only a text model is here."""
    for what, number in config.placeholders.items():
        if number in ids:
            raise InputError(
                f"token id {number} at position {ids.index(number)} stands for {what}, and this "
                "bundle has the text model only; give a prompt of text"
            )


def _as_list(token_ids: object, where: str) -> list[Any]:
    """A sequence or array of one dimension as a list of whatever is in it."""
    if isinstance(token_ids, Sequence) and not isinstance(token_ids, str | bytes | bytearray):
        if len(token_ids) > MOST_IDS:  # a range costs nothing, a list of it all memory
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


def given_lookups(config: ModelConfig, stem_ids: Sequence[StemId], length: int) -> list[RowLookup]:
    """What given stem ids of `length` tokens look up. Raises InputError."""
    if not isinstance(stem_ids, Sequence | np.ndarray):
        raise InputError("stem_ids must be a sequence: for each token an id, or several")
    if len(stem_ids) != length:
        raise InputError(f"{len(stem_ids)} stem_ids for {length} tokens; give one for each")
    layers = len(config.stem_layers)
    lookups = []
    for position, one in enumerate(stem_ids):
        several = one if isinstance(one, Sequence | np.ndarray) else [one]
        ids = checked_ids(several, config.vocab_size, f"stem_ids[{position}]: ")
        if not ids:
            raise InputError(f"stem_ids: none at position {position}; give at least one id")
        lookups.append(plain(tuple(ids), layers))
        if layers:
            check_lookup(config, lookups[-1])
    return lookups


def check_lookup(config: ModelConfig, lookup: RowLookup) -> None:
    """Raises InputError for a token that has no record, and for a mean of experts."""
    greatest = max(tokens_of(lookup), default=0)
    if greatest >= config.vocab_size:
        raise InputError(
            f"token {greatest} has no row: the tokenizer has tokens that the model has not; expected "
            f"0 to {config.vocab_size - 1}: take another text"
        )
    means = any(isinstance(row, tuple) and len(set(row)) > 1 for row in lookup)
    if config.n_experts and means:
        raise InputError(
            "the rows of this model are experts, and the mean of experts is none; let each token "
            "look up one (a scheme that is not average)"
        )
