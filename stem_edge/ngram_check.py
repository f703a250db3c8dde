"""Contradictions in the description of a model with rows of n-grams."""

from __future__ import annotations

from stem_edge.description import Description
from stem_edge.limits import MAX_LAYERS, MAX_ORDER, MAX_RECORDS


def check_ngrams(config: Description) -> None:
    """Raise ValueError if the numbers of tables of n-grams contradict each other, or are too large."""
    order, sizes, end = config.ngram_order, config.ngram_sizes, config.ngram_end
    if not 2 <= order <= MAX_ORDER or not sizes or len(sizes) % (order - 1):
        raise ValueError(
            f"ngram_order is {order} with {len(sizes)} ngram_sizes; expected 2 to {MAX_ORDER} and as "
            "many sizes for each of 2 to ngram_order ids"
        )
    if min(sizes) < 1 or sum(sizes) > MAX_RECORDS or len(sizes) > MAX_LAYERS:
        raise ValueError(
            f"{len(sizes)} ngram_sizes of {sum(sizes)} rows; expected at most {MAX_LAYERS} of "
            f"{MAX_RECORDS}, each at least 1"
        )
    if not 0 <= (end or 0) < config.vocab_size:
        raise ValueError(f"ngram_end is {end}; expected 0 to {config.vocab_size - 1}")
    if config.stem_layers != (0,) or not config.row_rank or config.streams > 1:
        raise ValueError(
            f"stem_layers {config.stem_layers}, row_rank {config.row_rank} and {config.streams} "
            "streams in an ngrams model; expected (0,), the values of a row, and 1 stream"
        )
