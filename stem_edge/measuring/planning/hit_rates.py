"""Hit rates of the row cache without a model: the runtime's own cache, run on given tokens."""

from __future__ import annotations

import numpy as np

from stem_edge.bundle.manifest import TABLES
from stem_edge.bundle.opening import Bundle
from stem_edge.numerics.quantize import I32, I64
from stem_edge.runtime.rows.cache import RowCache, needed_whole
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.runtime.steps import cut
from stem_edge.tables.rows import make_layout
from stem_edge.tables.store import open_table_store
from stem_edge.tables.token_counts import Counts


def simulate(
    ids: I64,
    records: int,
    slots: int,
    counts: Counts | None = None,
    *,
    prompt: int = 0,
    chunk: int = 1,
    splits: bool = False,
) -> tuple[float, int]:
    """Return the hit rate of the ids after the first `prompt` ones, and the slots filled at the end.

    Ids are numbers of records below `records`: see record_ids. The prompt is taken `chunk` ids at a
    time, as an engine cuts it, the others one by one. `counts` fill the cache first, as a warm start
    does. splits: tokens of the prompt but the last read only the first rows of their records.
    """
    # The smallest possible rows, because only which of them are kept matters.
    layout = make_layout(records, (0,), ((16,),), "int8", 16)
    slots = min(slots, records)
    cache = RowCache(ArraySlots(layout, slots))
    read = np.zeros((max(chunk, slots), layout.record_nbytes), np.uint8)
    if counts is not None:
        best = np.sort(cache.expect_counts(counts))
        if len(best):
            cache.install(best, read[: len(best)], best)

    def run(step: I64, whole: int | None) -> None:
        cache.use(step, whole)
        missing = cache.missing(step, whole)
        if len(missing):
            needed = needed_whole(missing, step, whole)
            cache.install(missing, read[: len(missing)], step, needed)

    chunks = cut(ids[:prompt], min(chunk, slots) if slots < records else chunk)
    for number, step in enumerate(chunks, 1):
        run(step, int(number == len(chunks)) if splits else None)
    before = cache.hits
    for step in ids[prompt:].reshape(-1, 1):
        run(step, None)
    return (cache.hits - before) / max(1, len(ids) - prompt), cache.filled


def record_ids(bundle: Bundle, token_ids: I64) -> I64:
    """Return the records of tokens, or of the n-grams that end at each."""
    if bundle.manifest.model.ngram_order:
        from stem_edge.numerics.ngram_hash import hash_of  # for such models alone

        return hash_of(bundle.manifest.model).keys(token_ids).ravel()
    index = token_index(bundle)
    return token_ids if index is None else index[token_ids].astype(np.int64)


def token_index(bundle: Bundle) -> I32 | None:
    """Return the record of each token of a bundle; None if each has the record of its own number."""
    return open_table_store(bundle.file(TABLES)).index if bundle.manifest.indexed else None


def from_counts(counts: Counts, slots: int) -> float:
    """Return the hit rate if tokens come independently, as counted, and the best are in the slots."""
    ordered = np.sort(counts)[::-1].astype(np.float64)
    return float(ordered[:slots].sum() / max(1.0, ordered.sum()))


def zipf_counts(records: int) -> Counts:
    """Return counts by Zipf's law: the n-th most frequent record is n times as rare as the first."""
    return (1e6 / np.arange(1, records + 1)).astype(np.uint32)
