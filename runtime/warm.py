"""A warm start of the row cache: rows of the tokens that text uses most, before the first prompt.

Counts come from earlier runs with the bundle, kept in the user's cache folder, else from the text
that its exporter counted. They say which tokens were used, not in which order.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import numpy as np

from stem_edge.bundle import TOKEN_COUNTS, Bundle
from stem_edge.errors import RowReadError
from stem_edge.runtime.cache import I64, RowCache
from stem_edge.runtime.prefetch import Prefetcher
from stem_edge.runtime.user_cache import cache_folder, counts_file
from stem_edge.token_counts import read_counts, write_counts

# Reading goes on while graphs are loaded, and at most this long.
SECONDS = 1.0


def expected_tokens(bundle: Bundle, cache: RowCache, cache_dir: str | Path | None) -> I64:
    """Tell the cache what was counted; the ids to fill it with, best first, none without counts."""
    vocab_size = cache.layout.vocab_size
    counts = read_counts(counts_file(cache_folder(cache_dir), bundle), vocab_size)
    if counts is None and TOKEN_COUNTS in bundle.manifest.files:
        counts = read_counts(bundle.file(TOKEN_COUNTS), vocab_size)
    return np.zeros(0, np.int64) if counts is None else cache.expect_counts(counts)


def fill(rows: Prefetcher, token_ids: I64, batch_tokens: int) -> None:
    """Read their rows; flash that fails now fails again, and is reported, when a row is needed."""
    with contextlib.suppress(RowReadError):
        rows.fill(token_ids, batch_tokens, time.perf_counter() + SECONDS)


def keep_counts(bundle: Bundle, cache: RowCache, cache_dir: str | Path | None) -> None:
    """Save what was counted; a folder that cannot be written is no reason to fail."""
    if cache.hits + cache.misses:
        with contextlib.suppress(OSError):
            write_counts(counts_file(cache_folder(cache_dir), bundle), cache.counts)
