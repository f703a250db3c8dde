"""Check of a bundle's tables from end to end, which opening leaves to the first use of a record.

NaN and infinity can carry a valid checksum, so values and scales are checked, too.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stem_edge.bundle.manifest import TABLES
from stem_edge.bundle.opening import Bundle
from stem_edge.files import disk
from stem_edge.files.hashing import read_piece
from stem_edge.files.plain_files import damaged
from stem_edge.numerics.quantize import F32, U8
from stem_edge.tables.codecs import CODECS
from stem_edge.tables.shards import ShardGrid
from stem_edge.tables.store import TableStore, open_table_store

PIECE_NBYTES = 8 << 20  # read at a time; a record may be larger


def check_tables(bundle: Bundle, progress: Callable[[int], object] = lambda nbytes: None) -> None:
    """Read every record; check that its checksum is right and that all its values are finite.

    `progress` is called with the number of bytes just checked. Raises BundleError naming shard,
    record and token. A dense model has nothing to check.
    """
    format = bundle.manifest.table_format
    if format is None:
        return
    store = open_table_store(bundle.file(TABLES))
    if store.format != format:
        said = f"its records are {store.format}, but the manifest says {format}"
        raise damaged(bundle.file(TABLES), f"{said}; the files are of different bundles")
    first = 0
    for grid in store.grids:
        for shard in range(grid.shards):
            _check_shard(store, grid, shard, first, progress)
        first += grid.layout.records


def _check_shard(
    store: TableStore,
    grid: ShardGrid,
    shard: int,
    first: int,
    progress: Callable[[int], object],
) -> None:
    """Check a shard of an array. first: number of its first record."""
    path, count = grid.shard_path(shard), grid.shard_records(shard)
    first += shard * grid.records_per_shard
    step = max(1, PIECE_NBYTES // grid.stride)
    descriptor = grid.open_shard(shard)
    try:
        for start in range(0, count, step):
            many, at = min(step, count - start), start * grid.stride
            data = read_piece(path, descriptor, many * grid.stride, at)
            records = np.frombuffer(data, np.uint8).reshape(many, grid.stride)
            if found := grid.first_damaged(records) or _first_infinite(grid, records):
                place, wrong = found
                record, at = first + start + place, at + place * grid.stride
                user = _user(store, record)
                raise damaged(path, f"record {record} ({user}) at byte {at}: {wrong}")
            progress(records.nbytes)
    finally:
        disk.close(descriptor)


def _first_infinite(grid: ShardGrid, checked: U8) -> tuple[int, str] | None:
    """Find the first of records [n, stride] with a number that is NaN or too large.

    Returns the record's place and what is wrong.
    """
    layout = grid.layout
    codes, scales = layout.split(grid.without_checksums(checked))
    unpack = CODECS[layout.row_type].unpack
    numbers, what = (scales, "scale") if layout.quantized else (unpack(codes), "value")
    # A scale must stay finite when it is multiplied by a code, which is up to half the range.
    largest = np.finfo(np.float32).max / (1 << layout.bits - 1 if layout.quantized else 1)
    floats: F32 = np.asarray(numbers, np.float32)
    with np.errstate(invalid="ignore"):
        bad = ~(np.abs(floats) <= np.float32(largest))
    if not bad.any():
        return None
    place, index, column = (int(at[0]) for at in np.nonzero(bad))
    found = floats[place, index, column]
    return place, f"{what} {column} of layer {layout.layers[index]} is {found}, not finite"


def _user(store: TableStore, record: int) -> str:
    """Name a token that looks this record up."""
    if store.index is None:
        return f"token {record}"
    tokens = np.flatnonzero(store.index == record)
    return f"token {tokens[0]}" if len(tokens) else "of no token"
