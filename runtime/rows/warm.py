"""Warm start of the row cache: rows of the most used tokens are read before the first prompt.

Counts of records come from earlier runs with the bundle, kept in the user's cache folder, or else
from the exporter, which counted the tokens of a text. They show what was used, not in which order.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
import warnings
from pathlib import Path

from stem_edge.bundle.manifest import MANIFEST, MAX_MANIFEST_NBYTES, TOKEN_COUNTS
from stem_edge.bundle.opening import Bundle
from stem_edge.files.plain_files import read_plain
from stem_edge.numerics.quantize import I32, I64
from stem_edge.runtime.rows.cache import RowCache
from stem_edge.runtime.rows.records import Records
from stem_edge.system.user_folder import KEY_CHARS, cache_folder
from stem_edge.tables.token_counts import Counts, counts_of_records, read_counts, write_counts

COUNTS = "counts"  # folder in the user's cache folder
# Reading overlaps with loading the graphs, but must not delay the first prompt by more than this.
SECONDS = 1.0


def fill(
    cache: RowCache, store: Records, records: I64, batch_size: int, seconds: float = math.inf
) -> None:
    """Read records into empty slots, in order, for at most so long.

    Records beyond the number of slots are left out. The memory plan counts a batch of `batch_size`
    records. Raises RowReadError.
    """
    deadline, wanted = time.perf_counter() + seconds, records[: cache.slots]
    for start in range(0, len(wanted), batch_size):
        if time.perf_counter() > deadline:
            return
        batch = cache.missing(wanted[start : start + batch_size])
        if len(batch):
            cache.install(batch, store.read(batch), batch)


def known_counts(bundle: Bundle, index: I32 | None, cache_dir: str | Path | None) -> Counts | None:
    """Uses of each record, if they were counted."""
    model = bundle.manifest.model
    path = counts_file(cache_folder(cache_dir), bundle)
    counts = read_counts(path, model.records)
    if counts is None and path.exists():
        warnings.warn(f"{path}: damaged token counts; counting anew", RuntimeWarning, stacklevel=2)
    if counts is None and not model.ngram_order and TOKEN_COUNTS in bundle.manifest.files:
        tokens = read_counts(bundle.file(TOKEN_COUNTS), model.vocab_size)
        counts = None if tokens is None else counts_of_records(tokens, index, model.records)
    return counts


def keep_counts(bundle: Bundle, cache: RowCache, cache_dir: str | Path | None) -> None:
    """Save the counts; a folder that cannot be written is ignored."""
    if cache.hits + cache.misses:
        with contextlib.suppress(OSError):
            write_counts(counts_file(cache_folder(cache_dir), bundle), cache.counts)


def counts_file(root: Path, bundle: Bundle) -> Path:
    """Path of the counts of this bundle."""
    return root / COUNTS / f"{bundle_key(bundle)}.npy"


def bundle_key(bundle: Bundle) -> str:
    """Name of a bundle's files in the cache folder: a digest of its manifest, which names all contents."""
    digest = hashlib.sha256(read_plain(bundle.file(MANIFEST), MAX_MANIFEST_NBYTES, "manifest"))
    return digest.hexdigest()[:KEY_CHARS]
