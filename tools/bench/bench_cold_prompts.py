"""Time the first token of prompts whose rows are on cold flash, beside the same with rows in memory.

    python tools/bench/bench_cold_prompts.py model ids.int32 --lengths 512 2048 8192 --rates 350 2000

IDS is a file of little-endian int32 token ids of real text, taken modulo the vocabulary. Each round
runs another piece of it with all of its rows in slots, and then, each time with no row in a slot and no
page of the tables in the page cache (Linux), from this disk and from emulated devices. Ratios are
medians over the rounds, with the least and the greatest. "Waited" is what steps waited for records.

With --rates, steps take the time of a processor of that speed (tokens/s) instead of computing.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias, cast

import numpy as np

import stem_edge
from stem_edge.bundle.manifest import TABLES
from stem_edge.graph.names import STEP_TOKENS
from stem_edge.numerics.quantize import F32, I32, I64
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.engine import Engine
from stem_edge.runtime.loading import load_with
from stem_edge.runtime.rows.cache import RowCache
from stem_edge.runtime.rows.emulated_flash import FLASH_NAMES, open_flash
from stem_edge.runtime.rows.prefetch import Prefetcher
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.runtime.rows.store import RowStore, open_store
from stem_edge.system.page_cache import drop_pages, files_in
from stem_edge.tables.store import TableFormat
from stem_edge.text_table import table

RESIDENT, DISK = "in memory", "this disk"
Run: TypeAlias = tuple[float, float, int, int]  # seconds, of which waited; records, bytes


class Pretended:
    """A backend, and its own context, whose steps only take time."""

    def __init__(self, rate: float) -> None:
        self._rate, self.length = rate, 1 << 30
        self.open_context = lambda length: self
        self.begin = self.close = lambda *_, **__: None

    def finish(self, slot_ids: I32, logits: int) -> F32:
        """Take the time of a step; rows are needed from the first layer on."""
        time.sleep(len(slot_ids) / self._rate)
        return np.zeros((1, 1), np.float32)


def open_engine(path: Path, length: int, rate: float | None) -> Engine:
    """Open a bundle with slots for all rows of a prompt; rate: of a processor to pretend."""
    if rate is None:
        return load_with(
            path, LoadOptions(warm_start=False, context_length=length, slots=length)
        ).engine
    manifest = stem_edge.open_bundle(path).manifest
    format, prompt_rows = cast(TableFormat, manifest.table_format), manifest.model.prompt_rows
    store = open_store(path / TABLES, format, prompt_rows=prompt_rows)
    rows = Prefetcher(store, RowCache(ArraySlots(format.tables, length)))
    return Engine(cast(Any, Pretended(rate)), rows, STEP_TOKENS)


def run(engine: Engine, files: list[Path], ids: I64, way: str) -> Run:
    """Process a prompt with its rows where `way` says."""
    rows = cast(Prefetcher, engine.rows)
    store = cast(RowStore, rows.store)
    if way != RESIDENT:
        rows.cache.forget(np.arange(store.layout.records))
        drop_pages(files)
    store._flash = open_flash(way if way in FLASH_NAMES else None)
    before, started = rows.counters(), time.perf_counter()
    for _ in engine.process(engine.open_context(len(ids)), ids.tolist()):
        pass
    seconds, spent = time.perf_counter() - started, rows.counters() - before
    return seconds, spent.stall_seconds, spent.misses, spent.bytes_read


def measure(args: argparse.Namespace, length: int, rate: float | None) -> list[tuple[str, ...]]:
    """Run a piece of text in each round, in all ways; return a line of the table for each way."""
    files, runs = files_in(args.bundle / TABLES), dict[str, list[Run]]()
    vocab_size = stem_edge.open_bundle(args.bundle).manifest.model.vocab_size
    ids = np.fromfile(args.ids, "<i4").astype(np.int64) % vocab_size
    engine, lines = open_engine(args.bundle, length, rate), list[tuple[str, ...]]()
    for turn in range(args.rounds):
        piece = ids[length * turn : length * (turn + 1)]
        run(engine, files, piece, DISK)  # fills the slots
        for way in (RESIDENT, DISK, *args.flash):
            runs.setdefault(way, []).append(run(engine, files, piece, way))
    engine.close()
    for way, found in runs.items():
        pairs = zip(found, runs[RESIDENT], strict=True)
        ratios = [one[0] / base[0] for one, base in pairs]
        seconds, waited, records, nbytes = (median(values) for values in zip(*found, strict=True))
        ratio = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        parts = f"{seconds:.3f}", ratio, f"{waited:.3f}", f"{records:.0f}", f"{nbytes / 1e6:.1f}"
        lines.append((str(length), str(rate or ""), way, *parts))
    return lines


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE")
    add("ids", type=Path, metavar="IDS")
    add("--lengths", type=int, nargs="+", default=[512, 2048, 8192], metavar="TOKENS")
    add("--rates", type=float, nargs="+", default=[None], metavar="TOKENS/S")
    add("--flash", nargs="*", default=["ufs4", "ufs2", "emmc", "sdcard"], choices=FLASH_NAMES)
    add("--rounds", type=int, default=3, help="(3)")
    args = parser.parse_args()
    rows = list[tuple[str, ...]]()
    for rate in args.rates:
        for length in args.lengths:
            rows += measure(args, length, rate)
    names = "tokens", "tok/s", "rows", "first token, s", "/ in memory", "waited, s", "records", "MB"
    print("\n".join(table([names, *rows], "r")))


if __name__ == "__main__":
    main()
