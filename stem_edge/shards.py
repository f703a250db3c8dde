"""The table store on disk: a zarr v3 group, read here without zarr.

    tables.zarr/zarr.json             group; its attributes hold the record layout
    tables.zarr/records/zarr.json     array uint8 [V, record_nbytes], one inner chunk a record
    tables.zarr/records/c/<s>/0       shard s: records in order, then the shard index

Codecs are `[bytes, crc32c]` inside `sharding_indexed` (zarr v3 core and sharding specifications), so
a shard is: for each record its bytes and their crc32c (uint32); then for each of the shard's
records_per_shard places an (offset, nbytes) pair of uint64; then the crc32c of those pairs. Places
beyond V hold the pair (2**64-1, 2**64-1). All little-endian.

One random record through zarr costs 400-1100 us, by pread 2-10 us: zarr is the format, not the
read path. Only dense shards in record order are accepted, so an offset is arithmetic and a missing
or empty chunk, which zarr would read as zeros, is an error.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import msgspec
import numpy as np

from stem_edge.errors import BundleError
from stem_edge.quantize import U8
from stem_edge.rows import RecordLayout

ARRAY = "records"
CRC_NBYTES = 4
INDEX_ENTRY_NBYTES = 16
MAX_JSON_NBYTES = 1 << 20
EMPTY = np.uint64(2**64 - 1)
ATTRIBUTE = "stem_edge"  # of the group: the record layout


def crc32c(data: U8 | bytes | memoryview) -> int:
    """Castagnoli CRC of a contiguous buffer."""
    return int(google_crc32c.value(data))


class ShardGrid(msgspec.Struct, frozen=True):
    """Where every record lies."""

    root: Path  # tables.zarr
    layout: RecordLayout
    records_per_shard: int

    @property
    def shards(self) -> int:
        """Number of shard files."""
        return -(-self.layout.vocab_size // self.records_per_shard)

    @property
    def stride(self) -> int:
        """Bytes from one record to the next: the record and its crc32c."""
        return self.layout.record_nbytes + CRC_NBYTES

    def shard_path(self, shard: int) -> Path:
        """File of a shard."""
        return self.root / ARRAY / "c" / str(shard) / "0"

    def shard_records(self, shard: int) -> int:
        """Records that a shard holds; the last one may hold fewer than the others."""
        start = shard * self.records_per_shard
        return min(self.records_per_shard, self.layout.vocab_size - start)

    def shard_nbytes(self, shard: int) -> int:
        """Exact size of a shard file."""
        index_nbytes = self.records_per_shard * INDEX_ENTRY_NBYTES + CRC_NBYTES
        return self.shard_records(shard) * self.stride + index_nbytes

    def index_bytes(self, shard: int) -> bytes:
        """The index of a shard: the same for every dense shard of that many records."""
        count = self.shard_records(shard)
        pairs = np.full((self.records_per_shard, 2), EMPTY, "<u8")
        pairs[:count, 0] = np.arange(count, dtype=np.uint64) * np.uint64(self.stride)
        pairs[:count, 1] = self.stride
        data = pairs.tobytes()
        return data + crc32c(data).to_bytes(CRC_NBYTES, "little")

    def check_shard(self, shard: int) -> None:
        """Compare size and index of a shard file with what they must be; raises BundleError."""
        path, expected = self.shard_path(shard), self.shard_nbytes(shard)
        try:
            found = path.stat().st_size
            if found == expected:
                with path.open("rb") as file:
                    file.seek(self.shard_records(shard) * self.stride)
                    index = file.read()
        except OSError as error:
            raise BundleError(
                f"{path}: cannot read this shard ({error.strerror}); restore the file or export again"
            ) from error
        if found != expected:
            raise BundleError(
                f"{path}: shard has {found} bytes, expected {expected}; "
                "the file is cut or damaged: copy or export the bundle again"
            )
        if index != self.index_bytes(shard):
            raise BundleError(
                f"{path}: shard index is damaged or not dense; copy or export the bundle again"
            )

    def seal(self, records: U8) -> bytes:
        """Records [n, record_nbytes] as they stand in a shard: each followed by its crc32c."""
        sealed = np.empty((len(records), self.stride), np.uint8)
        sealed[:, :-CRC_NBYTES] = records
        sums = np.fromiter((crc32c(record) for record in records), "<u4", len(records))
        sealed[:, -CRC_NBYTES:] = sums[:, None].view(np.uint8)
        return sealed.tobytes()


def group_metadata(layout: RecordLayout) -> dict[str, Any]:
    """zarr.json of the group."""
    attributes = {ATTRIBUTE: msgspec.to_builtins(layout)}
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


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
    grid = {"chunk_shape": [records_per_shard, layout.record_nbytes]}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [layout.vocab_size, layout.record_nbytes],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": grid},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "sharding_indexed", "configuration": inner}],
        "attributes": {},
        "storage_transformers": [],
    }


def encode_metadata(metadata: dict[str, Any]) -> bytes:
    """Bytes of a zarr.json."""
    return msgspec.json.format(msgspec.json.encode(metadata), indent=2)


def open_grid(root: Path) -> ShardGrid:
    """Read both zarr.json files; anything but what this module writes raises BundleError."""
    group_path, array_path = root / "zarr.json", root / ARRAY / "zarr.json"
    group, array = _read_json(group_path), _read_json(array_path)
    with _naming(group_path):
        layout = msgspec.convert(group["attributes"][ATTRIBUTE], RecordLayout)
        _compare(group, group_metadata(layout))
    with _naming(array_path):
        per_shard = array["chunk_grid"]["configuration"]["chunk_shape"][0]
        if type(per_shard) is not int or not 0 < per_shard <= layout.vocab_size:
            raise ValueError(f"chunk_shape has {per_shard} records in a shard")
        _compare(array, array_metadata(layout, per_shard))
    return ShardGrid(root=root, layout=layout, records_per_shard=per_shard)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Whatever the contents of this file make fail becomes one BundleError that names it."""
    try:
        yield
    except (msgspec.ValidationError, KeyError, TypeError, IndexError, ValueError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise BundleError(
            f"{path}: not a table store of this format ({reason}); export the bundle again"
        ) from error


def _compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """As JSON text, because Python holds 3 == 3.0 and False == 0."""
    for field in sorted(found.keys() | expected.keys()):
        texts = [
            msgspec.json.encode(side.get(field), order="sorted").decode()
            for side in (found, expected)
        ]
        if texts[0] != texts[1]:
            raise ValueError(f"{field} is {texts[0][:200]}, expected {texts[1]}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ValueError("it is no regular file")
        with path.open("rb") as file:
            data = file.read(MAX_JSON_NBYTES + 1)
        if len(data) > MAX_JSON_NBYTES:
            raise ValueError(f"larger than {MAX_JSON_NBYTES} bytes")
        return msgspec.json.decode(data, type=dict[str, Any])
    except OSError as error:
        raise BundleError(
            f"{path}: cannot read ({error.strerror}); the bundle is incomplete: export it again"
        ) from error
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError, RecursionError) as error:
        raise BundleError(f"{path}: not a zarr.json ({error}); export the bundle again") from error
