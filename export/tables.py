"""Tables of a checkpoint -> table store, in a stream.

The shards are written here and not through zarr: its pipeline takes one Python call chain a record
and holds whole shards in memory; the bytes are the same, which a test checks by reading with zarr.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stem_edge.bundle import FileEntry
from stem_edge.export.checkpoint import check_finite
from stem_edge.export.files import BundleFile, write_file
from stem_edge.export.parallel import in_order
from stem_edge.export.report import ErrorMeter
from stem_edge.reference import Matrix
from stem_edge.rows import RecordLayout
from stem_edge.shards import ARRAY, ShardGrid, array_metadata, encode_metadata, group_metadata

# A reader of the format holds a shard at a time, so shards must not grow with the tables.
SHARD_NBYTES = 128 << 20
# float32 values of one piece of work; packing takes some four times that, in each thread.
PIECE_NBYTES = 16 << 20


def make_grid(root: Path, layout: RecordLayout) -> ShardGrid:
    """A grid of shards of about SHARD_NBYTES."""
    per_shard = max(1, min(layout.vocab_size, SHARD_NBYTES // layout.record_nbytes))
    return ShardGrid(root=root, layout=layout, records_per_shard=per_shard)


def write_metadata(grid: ShardGrid) -> dict[Path, FileEntry]:
    """Write both zarr.json files; returns them."""
    metadata = {
        grid.root / "zarr.json": group_metadata(grid.layout),
        grid.root / ARRAY / "zarr.json": array_metadata(grid.layout, grid.records_per_shard),
    }
    return {path: write_file(path, encode_metadata(data)) for path, data in metadata.items()}


def write_shard(
    grid: ShardGrid,
    shard: int,
    tables: Mapping[int, Matrix],
    meter: ErrorMeter,
    threads: int,
    progress: Callable[[int], object],
) -> dict[Path, FileEntry]:
    """Write one shard; returns its file. `progress` gets source bytes as float32."""
    layout = grid.layout

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

    path = grid.shard_path(shard)
    with (
        ThreadPoolExecutor(threads, thread_name_prefix="stem-edge-export") as pool,
        BundleFile(path) as file,
    ):
        for piece in in_order(pool, seal, _spans(grid, shard), threads + 1):
            file.write(piece)
        file.write(grid.index_bytes(shard))
    return {path: file.entry}


def _spans(grid: ShardGrid, shard: int) -> Iterator[tuple[int, int]]:
    layout = grid.layout
    step = max(1, PIECE_NBYTES // (4 * layout.d_ff * len(layout.layers)))
    start = shard * grid.records_per_shard
    stop = start + grid.shard_records(shard)
    for at in range(start, stop, step):
        yield at, min(at + step, stop)
