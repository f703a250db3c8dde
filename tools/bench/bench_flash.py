"""Time reads of records by the row store, beside the disk's own rate.

    python tools/bench/bench_flash.py model ids.int32

IDS is a file of little-endian int32 token ids of real text; batches are drawn from its distinct ids.
"Cold" means that the table store was dropped from the page cache (Linux). The disk's own rate is that
of direct reads of as many pages as a record spans, at random places, by many threads.
"""

from __future__ import annotations

import argparse
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np

import stem_edge
from stem_edge.bundle.manifest import TABLES
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.rows.shards import READ_MODES
from stem_edge.runtime.rows.store import RowStore, open_store
from stem_edge.system.page_cache import drop_pages, files_in
from stem_edge.tables.shards import ShardGrid
from stem_edge.tables.store import TableFormat, open_table_store

PAGE = 4096
DEPTH = 32


def direct_rate(grid: ShardGrid, batch: int, rng: np.random.Generator) -> float:
    """MB/s of direct reads of whole pages around `batch` random records, DEPTH at a time."""
    nbytes = (-(-grid.stride // PAGE) + 1) * PAGE
    files = [os.open(grid.shard_path(n), os.O_RDONLY | os.O_DIRECT) for n in range(grid.shards)]
    tokens = rng.choice(grid.layout.records - 1, batch, replace=False)
    places = [divmod(int(token), grid.records_per_shard) for token in tokens]
    buffers = [mmap.mmap(-1, nbytes) for _ in range(DEPTH)]

    def read(lane: int) -> int:
        done = 0
        for shard, record in places[lane::DEPTH]:
            offset = record * grid.stride // PAGE * PAGE
            done += os.preadv(files[shard], [buffers[lane]], offset)
        return done

    try:
        with ThreadPoolExecutor(DEPTH) as pool:
            started = time.perf_counter()
            total = sum(pool.map(read, range(DEPTH)))
            return total / (time.perf_counter() - started) / 1e6
    finally:
        for file in files:
            os.close(file)


def store_rate(store: RowStore, ids: np.ndarray) -> float:
    """MB/s of one batched read, including the check of the records."""
    started, before = time.perf_counter(), store.bytes_read
    store.read(ids)
    return (store.bytes_read - before) / (time.perf_counter() - started) / 1e6


def single_microseconds(store: RowStore, ids: np.ndarray) -> F32:
    """Microseconds of each read of a single record."""
    times = []
    for at in range(len(ids)):
        started = time.perf_counter()
        store.read(ids[at : at + 1])
        times.append((time.perf_counter() - started) * 1e6)
    return np.array(times, np.float32)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path, metavar="BUNDLE")
    parser.add_argument("ids", type=Path, metavar="IDS")
    parser.add_argument("--batch", type=int, default=512, help="records per batch (512)")
    parser.add_argument("--rounds", type=int, default=7, help="(7)")
    args = parser.parse_args()
    root, rng = args.bundle / TABLES, np.random.default_rng(0)
    tables = stem_edge.open_bundle(args.bundle).manifest.table_format
    if tables is None or tables.indexed:
        raise SystemExit(f"{args.bundle}: has no tables with a record for every token")
    grid = open_table_store(root).grids[0]
    ids = np.fromfile(args.ids, "<i4").astype(np.int64)
    seen = np.unique(ids, return_index=True)[1]
    distinct = ids[np.sort(seen)]
    rates: dict[str, list[float]] = {}
    for turn in range(args.rounds):
        batch = np.sort(rng.choice(distinct, args.batch, replace=False))
        drop_pages(files_in(root))
        rates.setdefault("direct reads", []).append(direct_rate(grid, args.batch, rng))
        for mode in READ_MODES:
            with open_store(root, tables, mode) as store:
                drop_pages(files_in(root))
                rates.setdefault(f"{mode} batch, cold", []).append(store_rate(store, batch))
                rates.setdefault(f"{mode} batch, warm", []).append(store_rate(store, batch))
        if turn == 0:
            _print_singles(root, tables, batch)
    print(f"{args.batch} records of {grid.stride} bytes, {args.rounds} rounds, MB/s (median)")
    for name, values in rates.items():
        print(f"{name:<22}{median(values):>8.0f}  ({min(values):.0f} to {max(values):.0f})")
    cold, disk = rates["pread batch, cold"], rates["direct reads"]
    ratios = [a / b for a, b in zip(cold, disk, strict=True)]
    print(f"pread batch, cold / direct reads: {median(ratios):.2f}")


def _print_singles(root: Path, tables: TableFormat, ids: np.ndarray) -> None:
    print("one record, microseconds (median, 90 %)")
    for mode in READ_MODES:
        for state in ("cold", "warm"):
            with open_store(root, tables, mode) as store:
                if state == "cold":
                    drop_pages(files_in(root))
                times = single_microseconds(store, ids[:200])
            print(f"{mode} {state:<17}{np.median(times):>8.0f}{np.quantile(times, 0.9):>8.0f}")


if __name__ == "__main__":
    main()
