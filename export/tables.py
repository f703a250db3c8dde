"""Writes the table store of a bundle, piece by piece, from a checkpoint's tables.

The shards are valid zarr (a test reads them with the zarr library), but this module writes them itself:
the library makes many Python calls for each record, and holds whole shards in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from stem_edge.bundle.manifest import TABLES
from stem_edge.export.checkpoints.checkpoint import check_finite
from stem_edge.export.job.files import Output
from stem_edge.export.job.table_plan import TablePlan, scaling_of
from stem_edge.export.quantization.streams import in_order
from stem_edge.export.tensor_files.tensor import codes_of
from stem_edge.numerics.matrix import Matrix
from stem_edge.numerics.quantize import F32, I32, U8
from stem_edge.tables.packing import keep_records, pack_records
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.shards import ShardGrid, array_metadata, crc32c, index_blocks
from stem_edge.tables.store import ATTRIBUTE, INDEX
from stem_edge.tables.token_index import encode_index, index_chunk, index_metadata
from stem_edge.tables.zarr_json import group_document

# Shards must not grow with the tables, because zarr readers hold a whole shard in memory.
SHARD_NBYTES = 128 << 20
# float32 values that a thread packs at a time, which takes about four times as much memory.
PIECE_NBYTES = 16 << 20


def write_tables(out: Output, plan: TablePlan, tables: Mapping[int, Matrix], threads: int) -> None:
    """Write a bundle's table store. tables: STEM layer -> its table."""
    root, first = Path(TABLES), 0
    write_json(out, root, group_document(ATTRIBUTE, plan.format))
    if plan.index is not None:
        write_index(out, root / INDEX, plan.index)
    for name, layout in plan.format.arrays().items():
        grid = make_grid(root / name, layout, SHARD_NBYTES)
        step = max(1, PIECE_NBYTES // (4 * layout.row_width * len(layout.layers)))
        write_array(out, grid, step, threads, partial(_records, out, plan, tables, layout, first))
        first += layout.records


def write_json(out: Output, folder: Path, document: dict[str, Any]) -> None:
    out.write((folder / "zarr.json").as_posix(), encode_metadata(document))


def write_index(out: Output, folder: Path, index: I32) -> None:
    write_json(out, folder, index_metadata(len(index)))
    out.write(index_chunk(folder).as_posix(), encode_index(index))


def write_array(
    out: Output,
    grid: ShardGrid,
    piece_records: int,
    threads: int,
    work: Callable[[int, int], U8],
) -> None:
    """Write an array of records, in pieces of `piece_records` records. grid.root: a folder in `out`.

    work(start, stop): returns the bytes of records start..stop. Several threads call it at once.
    """
    write_json(out, grid.root, array_metadata(grid))
    for shard in range(grid.shards):
        start = shard * grid.records_per_shard
        stop = start + grid.shard_records(shard)
        starts = range(start, stop, piece_records)
        spans = ((at, min(at + piece_records, stop)) for at in starts)
        with out.file(grid.shard_path(shard).as_posix()) as file:
            for piece in in_order(threads, lambda span: with_checksums(work(*span)), spans):
                file.write(piece)
            for block in index_blocks(*grid.index_facts(shard)):
                file.write(block)


def with_checksums(records: U8) -> bytes:
    """Return records [n, record_nbytes] as bytes of a shard: each is followed by its crc32c."""
    sums = np.fromiter(map(crc32c, records), "<u4", len(records))
    return np.concatenate([records, sums[:, None].view(np.uint8)], axis=1).tobytes()


def encode_metadata(metadata: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(metadata), indent=2)


def _records(
    out: Output,
    plan: TablePlan,
    tables: Mapping[int, Matrix],
    layout: RecordLayout,
    first: int,
    start: int,
    stop: int,
) -> U8:
    """Return records start..stop of an array, as bytes. first: number of records in earlier arrays."""
    start, stop = first + start, first + stop
    out.bar.advance(4 * (stop - start) * layout.row_width * len(layout.layers))
    if (copied := _copied(plan, tables, layout, start, stop)) is not None:
        return copied
    rows = [_rows(plan, layer, tables[layer], start, stop) for layer in layout.layers]
    return pack_records(layout, rows, scaling_of(layout))


def _copied(
    plan: TablePlan, sources: Mapping[int, Matrix], layout: RecordLayout, start: int, stop: int
) -> U8 | None:
    """Return records start..stop with the checkpoint's own codes; None if it has none that fit."""
    scaled = [
        codes
        for layer in layout.layers
        if (codes := codes_of(sources[layer])) is not None
        and codes.bits == layout.bits
        and codes.group_size % layout.group_size == 0
    ]
    if len(scaled) < len(layout.layers) or plan.order is not None:
        return None
    rows = list[tuple[U8, F32]]()
    for layer, codes in zip(layout.layers, scaled, strict=True):
        scales = check_finite(f"table of layer {layer}", start, codes.scales(start, stop))
        scales = np.repeat(scales, codes.group_size // layout.group_size, axis=1)
        rows.append((codes.read(start, stop), scales))
    return keep_records(layout, rows)


def _rows(plan: TablePlan, layer: int, table: Matrix, start: int, stop: int) -> F32:
    """Read the rows of records start..stop. If plan.order is set, record i is row plan.order[i]."""
    runs = [(start, stop)]
    if plan.order is not None:  # sorted row numbers, read in runs without gaps
        numbers = plan.order[start:stop]
        cut = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
        runs = [(int(piece[0]), int(piece[-1]) + 1) for piece in cut]
    name = f"table of layer {layer}"
    pieces = [check_finite(name, run[0], table.rows(*run)) for run in runs]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def make_grid(root: Path, layout: RecordLayout, nbytes: int) -> ShardGrid:
    """Divide an array of records into shards of about `nbytes` each; return their layout."""
    per_shard = max(1, min(layout.records, nbytes // layout.record_nbytes))
    return ShardGrid(root, layout, per_shard)
