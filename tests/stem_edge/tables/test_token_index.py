"""The index of a table store: its exact bytes, and other files, which are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import zarr
from changing import edit
from shard_bytes import summed
from stores import write_index
from zarr.codecs import BytesCodec, Crc32cCodec
from zarr.storage import LocalStore

from stem_edge.errors import BundleError
from stem_edge.tables.token_index import index_chunk, index_metadata, read_index

INDEX = [2, 0, 2, 1]
DATA = struct.pack("<4i", *INDEX)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_index(tmp_path, INDEX)
    return tmp_path / "index"


def refusal(root: Path, tokens: int = 4, records: int = 3) -> str:
    with pytest.raises(BundleError) as caught:
        read_index(root, tokens, records)
    message = str(caught.value)
    assert message.startswith(str(root))
    assert "\n" not in message
    return message


def test_zarr_writes_the_same(root: Path, tmp_path: Path) -> None:
    array = zarr.create_array(
        LocalStore(tmp_path / "by_zarr"),
        shape=(4,),
        dtype="int32",
        chunks=(4,),
        serializer=BytesCodec(),
        compressors=[Crc32cCodec()],
        fill_value=0,
    )
    array[:] = np.array(INDEX, np.int32)
    assert index_chunk(tmp_path / "by_zarr").read_bytes() == index_chunk(root).read_bytes()
    found = json.loads((tmp_path / "by_zarr" / "zarr.json").read_bytes())
    assert found == json.loads((root / "zarr.json").read_bytes()) == index_metadata(4)


@pytest.mark.parametrize("data", [b"", DATA, summed(DATA)[:-1], summed(DATA) + b"\0"])
def test_another_size(root: Path, data: bytes) -> None:
    index_chunk(root).write_bytes(data)
    message = refusal(root)
    assert f"index has {len(data)} bytes" in message and "expected 20" in message


@pytest.mark.parametrize("at", range(20))
def test_any_flipped_bit(root: Path, at: int) -> None:
    data = bytearray(summed(DATA))
    data[at] ^= 1 << at % 8
    index_chunk(root).write_bytes(data)
    assert "the checksum of this index is wrong" in refusal(root)


@pytest.mark.parametrize(("value", "said"), [(3, "records 0 to 3"), (-1, "records -1 to 2")])
def test_records_that_there_are_not(root: Path, value: int, said: str) -> None:
    index_chunk(root).write_bytes(summed(struct.pack("<4i", 0, 1, 2, value)))
    assert f"refers to {said}, expected 0 to 2" in refusal(root)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        *[("shape 0", 10**30), ("shape", [4, 1]), ("shape", ...), ("data_type", "int64")],
        *[("chunk_grid configuration chunk_shape", [2]), ("fill_value", -1), ("zarr_format", 2)],
        *[("codecs 0 configuration endian", "big"), ("codecs", []), ("codecs 1 name", "gzip")],
        *[("unknown", 1), ("attributes", {"a": 1}), ("storage_transformers", ...)],
    ],
)
def test_metadata_of_another_kind(root: Path, where: str, value: object) -> None:
    edit(root / "zarr.json", where, value)
    assert refusal(root).endswith("export the bundle again")


@pytest.mark.parametrize("name", ["zarr.json", "c/0"])
def test_missing_files(root: Path, name: str) -> None:
    (root / name).unlink()
    assert "No such file" in refusal(root)
