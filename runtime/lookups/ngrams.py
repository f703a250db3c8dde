"""Keys of rows that the last tokens of a document pick together."""

from __future__ import annotations

from stem_edge.config import ModelConfig
from stem_edge.numerics.ngram_hash import hash_of
from stem_edge.numerics.quantize import I64
from stem_edge.runtime.rows.records import RowKeys


class NgramKeys(RowKeys):
    """Rows [T, lookups] of the n-grams that end at each token."""

    made = False

    def __init__(self, config: ModelConfig) -> None:
        self._hash = hash_of(config)
        self.before, self.each = self._hash.memory, config.lookups

    def of(self, token_ids: I64, row_ids: I64, first: int = 0) -> I64:
        return self._hash.keys(token_ids[first:], token_ids[:first])
