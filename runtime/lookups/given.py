"""Lookups that stem ids given by callers stand for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.errors import InputError
from stem_edge.runtime.lookups.lookups import StemId, checked_ids
from stem_edge.tables.rows import RowLookup, plain, tokens_of


def given_lookups(config: ModelConfig, stem_ids: Sequence[StemId], length: int) -> list[RowLookup]:
    """Lookups that given stem ids of `length` tokens stand for. Raises InputError."""
    if not isinstance(stem_ids, Sequence | np.ndarray):
        raise InputError("stem_ids must be a sequence; give one id, or several, for each token")
    if len(stem_ids) != length:
        raise InputError(f"{len(stem_ids)} stem_ids for {length} tokens; give one for each")
    layers = len(config.stem_layers)
    lookups = []
    for position, stem_id in enumerate(stem_ids):
        several = stem_id if isinstance(stem_id, Sequence | np.ndarray) else [stem_id]
        ids = checked_ids(several, config.vocab_size, f"stem_ids[{position}]: ")
        if not ids:
            raise InputError(f"stem_ids: none at position {position}; give at least one id")
        lookups.append(plain(tuple(ids), layers))
        if layers:
            check_lookup(config, lookups[-1])
    return lookups


def check_lookup(config: ModelConfig, lookup: RowLookup) -> None:
    """Raise InputError for a token without a record and for a mean of experts."""
    greatest = max(tokens_of(lookup), default=0)
    if greatest >= config.vocab_size:
        raise InputError(
            f"token {greatest} has no row, because the tokenizer has tokens that the model lacks; "
            f"expected 0 to {config.vocab_size - 1}: use another text"
        )
    means = any(isinstance(row, tuple) and len(set(row)) > 1 for row in lookup)
    if config.n_experts and means:
        raise InputError(
            "the rows of this model are experts, and a mean of experts is not an expert; let each "
            "token look up a single row (a scheme other than average)"
        )
