"""The read-only zarr store over memory maps."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import zarr
from shard_bytes import LAYOUT, RECORDS
from stores import write_store
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype

from stem_edge.bundle.mmap_store import MmapStore

SHARD = "records/c/0/0"
T = TypeVar("T")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_store(tmp_path, LAYOUT, RECORDS, records_per_shard=2)
    return tmp_path


@pytest.fixture
def store(root: Path) -> Iterator[MmapStore]:
    opened = MmapStore(root)
    yield opened
    opened.close()


def wait(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


async def listed(names: AsyncIterator[str]) -> list[str]:
    return sorted([name async for name in names])


def read(store: MmapStore, key: str, byte_range: ByteRequest | None = None) -> bytes | None:
    found = wait(store.get(key, default_buffer_prototype(), byte_range))
    return None if found is None else found.to_bytes()


def test_zarr_reads_the_records_through_it(store: MmapStore) -> None:
    records = zarr.open_group(store, mode="r")["records"]
    assert isinstance(records, zarr.Array)
    assert np.array_equal(np.asarray(records[:]), RECORDS)
    assert np.array_equal(np.asarray(records[2]), RECORDS[2])
    assert np.array_equal(np.asarray(records[1:]), RECORDS[1:])


def test_a_damaged_record_is_an_error(root: Path) -> None:
    path = root / SHARD
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    store = MmapStore(root)
    records = zarr.open_group(store, mode="r")["records"]
    assert isinstance(records, zarr.Array)
    with pytest.raises(ValueError, match="checksum"):
        records[0]
    store.close()


@pytest.mark.parametrize(
    ("byte_range", "expected"),
    [
        (None, slice(None)), (RangeByteRequest(0, 1), slice(0, 1)),
        (RangeByteRequest(24, 48), slice(24, 48)), (RangeByteRequest(24, 10**9), slice(24, None)),
        (RangeByteRequest(5, 5), slice(0, 0)), (OffsetByteRequest(0), slice(None)),
        (OffsetByteRequest(80), slice(80, None)), (OffsetByteRequest(10**9), slice(0, 0)),
        (SuffixByteRequest(36), slice(-36, None)), (SuffixByteRequest(0), slice(0, 0)),
        (SuffixByteRequest(10**9), slice(None)),
    ],
    ids=str,
)  # fmt: skip
def test_byte_ranges(
    root: Path, store: MmapStore, byte_range: ByteRequest | None, expected: slice
) -> None:
    assert read(store, SHARD, byte_range) == (root / SHARD).read_bytes()[expected]


@pytest.mark.parametrize("key", ["none", "records/c/9/0", "records", "zarr.json/below", ""])
def test_a_key_without_a_file_is_none(store: MmapStore, key: str) -> None:
    assert read(store, key) is None


def test_writing_is_refused(root: Path, store: MmapStore) -> None:
    before = (root / SHARD).read_bytes()
    buffer = default_buffer_prototype().buffer.from_bytes(b"x")
    for write in (store.set(SHARD, buffer), store.delete(SHARD), store.clear()):
        with pytest.raises(ValueError, match="read-only"):
            wait(write)
    assert (root / SHARD).read_bytes() == before


def test_listing(store: MmapStore) -> None:
    keys = ["records/c/0/0", "records/c/1/0", "records/zarr.json", "zarr.json"]
    assert wait(listed(store.list())) == keys
    assert wait(listed(store.list_prefix("records/c/"))) == keys[:2]
    assert wait(listed(store.list_dir(""))) == ["records", "zarr.json"]
    assert wait(store.exists(SHARD))
    assert not wait(store.exists("records/c/9/0"))
