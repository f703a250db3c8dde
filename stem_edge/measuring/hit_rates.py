"""Hit rate of the row cache on given tokens, without a model: the runtime's own cache, simulated."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from stem_edge.rows import make_layout
from stem_edge.runtime.cache import RowCache
from stem_edge.runtime.engine import cut
from stem_edge.token_counts import Counts

I64 = npt.NDArray[np.int64]


def simulate(
    ids: I64,
    vocab_size: int,
    slots: int,
    counts: Counts | None = None,
    *,
    prompt: int = 0,
    chunk: int = 1,
) -> tuple[float, int]:
    """Hit rate of the ids after the first `prompt` ones, and the slots that are filled in the end.

    The prompt is taken `chunk` ids at a time, as an engine cuts it, the others one by one. `counts`
    fill the cache first, as a warm start does. Rows are of the smallest size there is: only which
    are kept matters.
    """
    layout = make_layout(vocab_size, (0,), 16, "int8", 16)
    slots = min(slots, vocab_size)
    cache = RowCache(layout, slots)
    records = np.zeros((max(chunk, slots), layout.record_nbytes), np.uint8)
    if counts is not None:
        best = np.sort(cache.expect_counts(counts))
        if len(best):
            cache.install(best, records[: len(best)], best)

    def run(steps: Iterable[I64]) -> None:
        for step in steps:
            cache.use(step)
            missing = cache.missing(step)
            if len(missing):
                cache.install(missing, records[: len(missing)], step)

    run(cut(ids[:prompt], min(chunk, slots)))
    before = cache.hits
    run(ids[prompt:].reshape(-1, 1))
    return (cache.hits - before) / max(1, len(ids) - prompt), cache.filled


def from_counts(counts: Counts, slots: int) -> float:
    """Hit rate if tokens come independently, as often as counted, and the best are in the slots."""
    ordered = np.sort(counts)[::-1].astype(np.float64)
    return float(ordered[:slots].sum() / max(1.0, ordered.sum()))


def zipf_counts(vocab_size: int) -> Counts:
    """Counts of a text that nobody counted: the n-th most frequent token is n times as rare."""
    return (1e6 / np.arange(1, vocab_size + 1)).astype(np.uint32)
