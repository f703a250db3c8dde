"""Warm start of the row cache: reads the most used tokens' rows before the first prompt.

Uses were counted in earlier runs with the bundle and saved in the user's cache folder, or counted in
a text by the exporter. Saved counts reveal which tokens were used, but not in which order.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from pathlib import Path

import numpy as np

from stem_edge.bundle.manifest import TOKEN_COUNTS, digest, encode_manifest
from stem_edge.bundle.opening import Bundle
from stem_edge.files.names import cache_folder
from stem_edge.numerics.quantize import I64
from stem_edge.runtime.rows.cache import RowCache
from stem_edge.runtime.rows.store import RowStore
from stem_edge.tables.token_counts import (
    Uses,
    counts_of_records,
    read_counts,
    read_uses,
    write_uses,
)

COUNTS = "counts"  # folder in the user's cache folder
# Reading overlaps with loading the graphs, but must not delay the first prompt by more than this.
SECONDS = 1.0


def fill(
    cache: RowCache,
    store: RowStore,
    records: I64 | range,
    batch_size: int,
    seconds: float = math.inf,
) -> None:
    """Read records in order into empty slots, until the slots are full or `seconds` have passed.

    batch_size: records per read; the memory plan includes one batch. Raises RowReadError.
    """
    deadline, wanted = time.perf_counter() + seconds, records[: cache.slots]
    for start in range(0, len(wanted), batch_size):
        if time.perf_counter() > deadline:
            return
        slots, missing = cache.find(np.asarray(wanted[start : start + batch_size], np.int64))
        if len(missing.numbers):
            cache.install(missing, store.read(*missing), slots)


def known_uses(bundle: Bundle, store: RowStore, cache_dir: str | Path | None) -> Uses | None:
    """Return how often records were used earlier; None if nothing was counted."""
    model = bundle.manifest.model
    path = uses_file(cache_folder(cache_dir), bundle)
    uses = read_uses(path, model.records)
    if uses is None and path.exists():
        warnings.warn(f"{path}: damaged counts; counting anew", RuntimeWarning, stacklevel=2)
    if uses is None and not model.ngram_order and TOKEN_COUNTS in bundle.manifest.files:
        counts = read_counts(bundle.file(TOKEN_COUNTS), model.vocab_size)
        if counts is not None:
            record_of = store.records_of(np.arange(model.vocab_size))
            counts = counts_of_records(counts, record_of, model.records)
            uses = Uses(used := np.flatnonzero(counts), counts[used])
    return uses


def keep_uses(bundle: Bundle, cache: RowCache, cache_dir: str | Path | None) -> None:
    """Save the use counts of cached records. Ignores a folder that cannot be written."""
    if cache.hits + cache.misses:
        records, counts = cache.uses()
        stored = records < cache.layout.records  # not made by edits, which no other run has
        with contextlib.suppress(OSError):
            path = uses_file(cache_folder(cache_dir), bundle)
            write_uses(path, Uses(records[stored], counts[stored]))


def uses_file(root: Path, bundle: Bundle) -> Path:
    """Return the path of a bundle's saved use counts."""
    return root / COUNTS / f"{digest(encode_manifest(bundle.manifest))}.npy"
