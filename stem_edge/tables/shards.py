"""One array of records on disk: a zarr v3 array in shards, read here without zarr.

    records/zarr.json     array uint8 [records, record_nbytes], one inner chunk a record
    records/c/<s>/0       shard s: records in order, then the shard index

Codecs are `[bytes, crc32c]` inside `sharding_indexed` (zarr v3 core and sharding specifications), so
a shard is: for each record its bytes and their crc32c (uint32); then for each of the shard's
records_per_shard places an (offset, nbytes) pair of uint64; then the crc32c of those pairs. Places
beyond the last record hold the pair (2**64-1, 2**64-1). All little-endian.

One random record through zarr costs 400-1100 us, by pread 2-10 us: zarr is the format, not the
read path. Only dense shards in record order are accepted, so an offset is arithmetic and a missing
or empty chunk, which zarr would read as zeros, is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec
import numpy as np

from stem_edge.errors import BundleError
from stem_edge.files import disk
from stem_edge.files.plain_files import check_folder, open_plain, read_at, unreadable
from stem_edge.numerics.quantize import U8
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.zarr_json import array_document, compare, naming, read_json

CRC_NBYTES = 4
INDEX_ENTRY_NBYTES = 16
INDEX_PIECE_ENTRIES = 1 << 16
EMPTY = np.uint64(2**64 - 1)


def crc32c(data: U8 | bytes | memoryview) -> int:
    """Castagnoli CRC of a contiguous buffer."""
    return int(google_crc32c.value(data))


class ShardGrid(msgspec.Struct, frozen=True):
    """Where every record lies."""

    root: Path  # of the array
    layout: RecordLayout
    records_per_shard: int

    @property
    def shards(self) -> int:
        """Number of shard files."""
        return -(-self.layout.records // self.records_per_shard)

    @property
    def stride(self) -> int:
        """Bytes from one record to the next: the record and its crc32c."""
        return self.layout.record_nbytes + CRC_NBYTES

    def shard_path(self, shard: int) -> Path:
        """File of a shard."""
        return self.root / "c" / str(shard) / "0"

    def shard_records(self, shard: int) -> int:
        """Records that a shard holds; the last one may hold fewer than the others."""
        start = shard * self.records_per_shard
        return min(self.records_per_shard, self.layout.records - start)

    def shard_nbytes(self, shard: int) -> int:
        """Exact size of a shard file."""
        index_nbytes = self.records_per_shard * INDEX_ENTRY_NBYTES + CRC_NBYTES
        return self.shard_records(shard) * self.stride + index_nbytes

    def index_bytes(self, shard: int) -> bytes:
        """The index of a shard: the same for every dense shard of that many records."""
        return b"".join(self._index_pieces(shard))

    def _index_pieces(self, shard: int) -> Iterator[bytes]:
        """The same, piece by piece: it grows with the records."""
        count, crc = self.shard_records(shard), 0
        for start in range(0, self.records_per_shard, INDEX_PIECE_ENTRIES):
            stop = min(start + INDEX_PIECE_ENTRIES, self.records_per_shard)
            places = np.arange(start, stop, dtype="<u8")
            pairs = np.full((stop - start, 2), EMPTY, "<u8")
            pairs[:, 0] = np.where(places < count, places * np.uint64(self.stride), EMPTY)
            pairs[: max(0, count - start), 1] = self.stride
            piece = pairs.tobytes()
            crc = int(google_crc32c.extend(crc, piece))
            yield piece
        yield crc.to_bytes(CRC_NBYTES, "little")

    def open_shard(self, shard: int) -> int:
        """Descriptor of a shard file, whose size and index were compared through it.

        Raises BundleError.
        """
        path = self.shard_path(shard)
        check_folder(path.parent)
        descriptor = open_plain(path, "shard")
        try:
            self._compare_size(path, disk.size(descriptor), shard)
            self._compare_index(path, descriptor, shard)
        except OSError as error:
            disk.close(descriptor)
            raise unreadable(path, "shard", error) from error
        except BaseException:
            disk.close(descriptor)
            raise
        return descriptor

    def _compare_size(self, path: Path, found: int, shard: int) -> None:
        if found != (expected := self.shard_nbytes(shard)):
            raise BundleError(
                f"{path}: shard has {found} bytes, expected {expected}; "
                "the file is cut or damaged: copy or export the bundle again"
            )

    def _compare_index(self, path: Path, descriptor: int, shard: int) -> None:
        at = self.shard_records(shard) * self.stride
        for expected in self._index_pieces(shard):
            if read_at(descriptor, len(expected), at) != expected:
                raise BundleError(
                    f"{path}: shard index is damaged or not dense at byte {at}; copy or export the "
                    "bundle again"
                )
            at += len(expected)

    def seal(self, records: U8) -> bytes:
        """Records [n, record_nbytes] as they stand in a shard: each followed by its crc32c."""
        sealed = np.empty((len(records), self.stride), np.uint8)
        sealed[:, :-CRC_NBYTES] = records
        sums = np.fromiter((crc32c(record) for record in records), "<u4", len(records))
        sealed[:, -CRC_NBYTES:] = sums[:, None].view(np.uint8)
        return sealed.tobytes()


def array_metadata(layout: RecordLayout, records_per_shard: int) -> dict[str, Any]:
    """zarr.json of the array."""
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
        [records_per_shard, layout.record_nbytes],
        [{"name": "sharding_indexed", "configuration": inner}],
    )


def open_grid(root: Path, layout: RecordLayout) -> ShardGrid:
    """The grid of an array of such records; raises BundleError for any other zarr.json."""
    for folder in (root, root / "c"):
        check_folder(folder)
    path = root / "zarr.json"
    array = read_json(path)
    with naming(path):
        per_shard = array["chunk_grid"]["configuration"]["chunk_shape"][0]
        if type(per_shard) is not int or not 0 < per_shard <= layout.records:
            raise ValueError(f"chunk_shape has {per_shard} records in a shard")
        compare(array, array_metadata(layout, per_shard))
    return ShardGrid(root=root, layout=layout, records_per_shard=per_shard)
