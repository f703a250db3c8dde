"""Tables of a checkpoint -> table store, in a stream.

The shards are written here and not through zarr: its pipeline takes one Python call chain a record
and holds whole shards in memory; the bytes are the same, which a test checks by reading with zarr.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from stem_edge.bundle import FileEntry
from stem_edge.export.checkpoint import check_finite
from stem_edge.export.files import BundleFile, write_file
from stem_edge.export.report import ErrorMeter
from stem_edge.reference import Matrix
from stem_edge.rows import RecordLayout
from stem_edge.shards import ARRAY, ShardGrid, array_metadata, encode_metadata, group_metadata

# A reader of the format holds a shard at a time, so shards must not grow with the tables.
SHARD_NBYTES = 128 << 20
# float32 values of one piece of work; packing takes some four times that, in each thread.
PIECE_NBYTES = 16 << 20

T = TypeVar("T")
R = TypeVar("R")


def make_grid(root: Path, layout: RecordLayout) -> ShardGrid:
    """A grid of shards of about SHARD_NBYTES."""
    per_shard = max(1, min(layout.vocab_size, SHARD_NBYTES // layout.record_nbytes))
    return ShardGrid(root=root, layout=layout, records_per_shard=per_shard)


def write_tables(
    grid: ShardGrid,
    tables: Mapping[int, Matrix],
    meter: ErrorMeter,
    threads: int,
    progress: Callable[[int], object],
) -> dict[Path, FileEntry]:
    """Write the whole table store; returns its files. `progress` gets source bytes as float32."""
    layout, root = grid.layout, grid.root
    metadata = {
        root / "zarr.json": group_metadata(layout),
        root / ARRAY / "zarr.json": array_metadata(layout, grid.records_per_shard),
    }
    entries = {path: write_file(path, encode_metadata(data)) for path, data in metadata.items()}

    def seal(span: tuple[int, int]) -> bytes:
        rows = []
        for layer in layout.layers:
            values = tables[layer].rows(*span)
            rows.append(check_finite(f"table of layer {layer}", span[0], values))
        records = layout.pack(rows)
        for index, values in enumerate(rows):
            meter.add("tables", values, layout.unpack(records, index))
        progress(sum(values.nbytes for values in rows))
        return grid.seal(records)

    with ThreadPoolExecutor(threads, thread_name_prefix="stem-edge-export") as pool:
        for shard in range(grid.shards):
            with BundleFile(grid.shard_path(shard)) as file:
                for piece in _in_order(pool, seal, _spans(grid, shard), threads + 1):
                    file.write(piece)
                file.write(grid.index_bytes(shard))
            entries[grid.shard_path(shard)] = file.entry
    return entries


def _spans(grid: ShardGrid, shard: int) -> Iterator[tuple[int, int]]:
    layout = grid.layout
    step = max(1, PIECE_NBYTES // (4 * layout.d_ff * len(layout.layers)))
    start = shard * grid.records_per_shard
    stop = start + grid.shard_records(shard)
    for at in range(start, stop, step):
        yield at, min(at + step, stop)


def _in_order(
    pool: ThreadPoolExecutor, work: Callable[[T], R], items: Iterable[T], ahead: int
) -> Iterator[R]:
    """work(item) of every item, in order, with at most `ahead` of them under way or waiting."""
    pending: deque[Future[R]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) >= ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
