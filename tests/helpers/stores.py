"""Table stores of a few records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from stem_edge.export.tables import encode_metadata, with_checksums
from stem_edge.files import disk
from stem_edge.numerics.quantize import I64, U8
from stem_edge.runtime.rows.cache import RowCache
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.runtime.rows.store import RowStore, open_store
from stem_edge.tables import store as tables
from stem_edge.tables import token_index
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.shards import ShardGrid, array_metadata, index_blocks
from stem_edge.tables.zarr_json import group_document

Way: TypeAlias = Literal["pread", "far", "memory"]


def ids(*numbers: int) -> I64:
    """Make an array of token or record numbers."""
    return np.array(numbers, np.int64)


def resident(cache: RowCache) -> set[int]:
    """Numbers of the records that are in a slot."""
    every = np.arange(cache.layout.records)
    return set(every.tolist()) - set(cache.find(every).missing.tolist())


def flip_bit(path: Path, offset: int) -> None:
    """Flip a bit of the byte at `offset` of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def check_shard(grid: ShardGrid, shard: int) -> None:
    """Check size and index of a shard file, as opening it does."""
    disk.close(grid.open_shard(shard))


def arrays_of(cache: RowCache) -> ArraySlots:
    """The arrays of a row cache for onnxruntime."""
    assert isinstance(cache.storage, ArraySlots)
    return cache.storage


def write_array(root: Path, layout: RecordLayout, records: U8, records_per_shard: int) -> ShardGrid:
    """Write an array of records into the folder `root`."""
    grid = ShardGrid(root, layout, records_per_shard)
    root.mkdir(parents=True)
    (root / "zarr.json").write_bytes(encode_metadata(array_metadata(grid)))
    for shard in range(grid.shards):
        path = grid.shard_path(shard)
        path.parent.mkdir(parents=True)
        piece = records[shard * records_per_shard :][:records_per_shard]
        index = index_blocks(*grid.index_facts(shard))
        path.write_bytes(b"".join([with_checksums(piece), *index]))
    return grid


def write_index(root: Path, index: Sequence[int]) -> None:
    """Write the token index of a table store in the folder `root`."""
    chunk = token_index.index_chunk(root / tables.INDEX)
    chunk.parent.mkdir(parents=True)
    (root / tables.INDEX / "zarr.json").write_bytes(
        encode_metadata(token_index.index_metadata(len(index)))
    )
    chunk.write_bytes(token_index.encode_index(np.array(index, np.int32)))


def write_store(
    root: Path,
    layout: RecordLayout,
    records: U8,
    records_per_shard: int,
    index: Sequence[int] | None = None,
    rare: tuple[RecordLayout, U8] | None = None,
) -> tables.TableFormat:
    """Write a table store into the folder `root`; `rare` is its second array, if any."""
    format = tables.TableFormat(
        tokens=layout.records if index is None else len(index),
        stored=layout,
        rare_tables=rare[0] if rare else None,
        indexed=index is not None,
    )
    write_array(root / tables.RECORDS, format.arrays()[tables.RECORDS], records, records_per_shard)
    if rare is not None:
        write_array(root / tables.RARE_RECORDS, *rare, records_per_shard)
    if index is not None:
        write_index(root, index)
    (root / "zarr.json").write_bytes(encode_metadata(group_document(tables.ATTRIBUTE, format)))
    return format


def open_way(root: Path, format: tables.TableFormat, way: Way) -> RowStore:
    """Open a table store in one of the ways that records are read.

    way: pread; far: its shards through fsspec; memory: these in fsspec's memory.
    """
    if way == "pread":
        return open_store(root, format)
    url = str(root)
    if way == "memory":
        from fsspec.implementations.memory import MemoryFileSystem

        url = f"memory://{root.name}"
        for path in root.glob("*/c/*/0"):
            MemoryFileSystem().pipe(f"/{root.name}/{path.relative_to(root)}", path.read_bytes())
    return open_store(root, format, url=url)
