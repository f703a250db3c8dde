"""Opens a table store, whose records are in the shards of zarr v3 arrays, without zarr.

    records/zarr.json     array uint8 [records, record_nbytes]; an inner chunk is a record
    records/c/<s>/0       shard s: records in order, then the shard index

Codecs are `[bytes, crc32c]` inside `sharding_indexed` (zarr v3 core and sharding specifications).
A shard contains its records, each followed by its crc32c (uint32). Then comes the index: an (offset, nbytes)
pair of uint64 for each of records_per_shard records, and the crc32c of all pairs. Places beyond the last record
of the array have the pair (2**64-1, 2**64-1). All numbers are little-endian.

Reading a random record takes 400-1100 us with the zarr package, and 2-10 us with pread. So the format
is zarr, but records are read with pread. Offsets are computed, because only dense shards in record
order are accepted. A missing or empty chunk, which zarr would read as zeros, is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec
import numpy as np

from stem_edge.files import disk
from stem_edge.files.plain_files import check_folder, damaged, open_plain, read_at, unreadable
from stem_edge.numerics.quantize import I32, U8
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.store import ATTRIBUTE, CRC_NBYTES, INDEX, INDEX_ENTRY_NBYTES, TableFormat
from stem_edge.tables.zarr_json import array_document, compare, naming, read_group, read_json

# CRC-32C of anything followed by its own CRC-32C, little-endian: the residue of the polynomial.
INTACT = 0x48674BC7
INDEX_PIECE_ENTRIES = 1 << 16
EMPTY = np.uint64(2**64 - 1)


def crc32c(data: U8 | bytes | memoryview) -> int:
    return int(google_crc32c.value(data))


class ShardGrid(msgspec.Struct, frozen=True):
    """Shard files of an array of records: their paths, sizes, indexes and checksums."""

    root: Path  # of the array
    layout: RecordLayout
    records_per_shard: int

    @property
    def shards(self) -> int:
        return -(-self.layout.records // self.records_per_shard)

    @property
    def stride(self) -> int:
        """Bytes from one record to the next: of a record and its crc32c."""
        return self.layout.record_nbytes + CRC_NBYTES

    def shard_path(self, shard: int) -> Path:
        return self.root / "c" / str(shard) / "0"

    def shard_records(self, shard: int) -> int:
        start = shard * self.records_per_shard
        return min(self.records_per_shard, self.layout.records - start)

    def shard_nbytes(self, shard: int) -> int:
        index_nbytes = self.records_per_shard * INDEX_ENTRY_NBYTES + CRC_NBYTES
        return self.shard_records(shard) * self.stride + index_nbytes

    def index_facts(self, shard: int) -> tuple[int, int, int]:
        """Return (records in a shard, index entries, bytes of a record and crc32c)."""
        return self.shard_records(shard), self.records_per_shard, self.stride

    def open_shard(self, shard: int) -> int:
        """Open a shard file, and check its size and the checksum of its index. Raises BundleError.

        The index itself (4 MB for Gemma 3n E2B) is not read. Offsets of records are computed, as if the records
        followed each other without gaps. The checksum must be that of an index with these offsets.
        """
        path = self.shard_path(shard)
        check_folder(path.parents[1])
        check_folder(path.parent)
        descriptor = open_plain(path, "shard")
        try:
            self._check_shard(path, descriptor, shard)
        except OSError as error:
            disk.close(descriptor)
            raise unreadable(path, "shard", error) from error
        except BaseException:
            disk.close(descriptor)
            raise
        return descriptor

    def _check_shard(self, path: Path, descriptor: int, shard: int) -> None:
        nbytes, expected = disk.size(descriptor), self.shard_nbytes(shard)
        if nbytes != expected:
            raise damaged(path, f"shard has {nbytes} bytes, expected {expected}")
        found = read_at(descriptor, CRC_NBYTES, nbytes - CRC_NBYTES)
        if found != _index_crc32c(*self.index_facts(shard)):
            at = self.shard_records(shard) * self.stride
            raise damaged(path, f"shard index is damaged or not dense at byte {at}")


def damage(checked: U8) -> str:
    """Return a message if the bytes of a record do not have the crc32c that follows them, else ""."""
    if crc32c(checked) == INTACT:
        return ""
    found, expected = crc32c(checked[:-CRC_NBYTES]), checked[-CRC_NBYTES:].tobytes()
    return f"its crc32c is {found:08x}, expected {int.from_bytes(expected, 'little'):08x}"


def index_blocks(records: int, entries: int, stride: int) -> Iterator[bytes]:
    """Yield a shard's index as blocks of bytes. Entries after the first `records` are empty."""
    crc = 0
    for start in range(0, entries, INDEX_PIECE_ENTRIES):
        stop = min(start + INDEX_PIECE_ENTRIES, entries)
        places = np.arange(start, stop, dtype="<u8")
        pairs = np.full((stop - start, 2), EMPTY, "<u8")
        pairs[:, 0] = np.where(places < records, places * np.uint64(stride), EMPTY)
        pairs[: max(0, records - start), 1] = stride
        block = pairs.tobytes()
        crc = int(google_crc32c.extend(crc, block))
        yield block
    yield crc.to_bytes(CRC_NBYTES, "little")


@cache  # most shards of a table have the same index
def _index_crc32c(records: int, entries: int, stride: int) -> bytes:
    *_, last = index_blocks(records, entries, stride)
    return last


def array_metadata(grid: ShardGrid) -> dict[str, Any]:
    layout = grid.layout
    inner = {
        "chunk_shape": [1, layout.record_nbytes],
        "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
        "index_codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        ],
        "index_location": "end",
    }
    return array_document(
        [layout.records, layout.record_nbytes],
        "uint8",
        [grid.records_per_shard, layout.record_nbytes],
        [{"name": "sharding_indexed", "configuration": inner}],
    )


def open_grid(root: Path, layout: RecordLayout) -> ShardGrid:
    """Open an array of records with this layout. Raises BundleError for any other zarr.json.

    The shards are not read, because they may be on another machine.
    """
    check_folder(root)
    path = root / "zarr.json"
    array = read_json(path)
    with naming(path):
        per_shard = array["chunk_grid"]["configuration"]["chunk_shape"][0]
        if type(per_shard) is not int or not 0 < per_shard <= layout.records:
            raise ValueError(f"{per_shard} records in a shard; expected 1 to {layout.records}")
        grid = ShardGrid(root, layout, per_shard)
        compare(array, array_metadata(grid))
    return grid


class TableStore(msgspec.Struct, frozen=True):
    format: TableFormat
    grids: tuple[ShardGrid, ...]
    index: I32 | None


def open_table_store(root: Path) -> TableStore:
    """Open a table store. Raises BundleError unless it is exactly as the exporter writes it."""
    format = read_group(root, ATTRIBUTE, TableFormat)
    grids = tuple(open_grid(root / name, layout) for name, layout in format.arrays().items())
    index = None
    if format.indexed:
        from stem_edge.tables.token_index import read_index  # only for such tables

        index = read_index(root / INDEX, format.tokens, format.tables.records)
    return TableStore(format, grids, index)
