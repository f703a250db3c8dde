"""Shards: exact bytes, and the same bytes as written by zarr."""

import json
from pathlib import Path

import numpy as np
import pytest
import zarr
from shard_bytes import LAYOUT, RECORDS
from stores import write_array
from zarr.codecs import BytesCodec, Crc32cCodec
from zarr.storage import LocalStore

from stem_edge.tables.shards import ShardGrid, array_metadata, open_grid


@pytest.fixture
def grid(tmp_path: Path) -> ShardGrid:
    return write_array(tmp_path / "records", LAYOUT, RECORDS, records_per_shard=2)


def test_zarr_reads_and_writes_the_same(tmp_path: Path) -> None:
    grid = write_array(tmp_path / "records", LAYOUT, RECORDS, 2)
    assert open_grid(grid.root, LAYOUT) == grid
    root = tmp_path / "by_zarr"
    array = zarr.create_array(
        LocalStore(root),
        shape=RECORDS.shape,
        dtype="uint8",
        shards=(2, 20),
        chunks=(1, 20),
        serializer=BytesCodec(),
        compressors=[Crc32cCodec()],
        fill_value=0,
        config={"write_empty_chunks": True},
    )
    array[:] = RECORDS
    assert np.array_equal(zarr.open_array(LocalStore(grid.root), mode="r")[:], RECORDS)
    for ours in map(grid.shard_path, range(2)):
        assert (root / ours.relative_to(grid.root)).read_bytes() == ours.read_bytes()
    assert json.loads((root / "zarr.json").read_bytes()) == array_metadata(grid)
