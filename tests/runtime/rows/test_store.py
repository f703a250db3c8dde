"""The row store: one contract for both ways to read, with and without optional system calls."""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from stores import Way, flip_bit, ids, open_way, write_store

from stem_edge.errors import BundleError, RowReadError
from stem_edge.files import disk
from stem_edge.numerics.quantize import U8
from stem_edge.runtime.rows.rows import RowCounters
from stem_edge.runtime.rows.store import open_store
from stem_edge.tables.packing import pack_records
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.store import TableFormat
from stem_edge.tables.widening import widen

V = 11
LAYOUT = RecordLayout(records=V, layers=(1, 3), parts=((32,),), row_type="int8", group_size=16)
FORMAT = TableFormat(tokens=V, stored=LAYOUT)
PER_SHARD = 4  # so three shards, the last one with three records
ORDERS = [
    [], [0], [10], [3, 4], [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [5, 5, 0, 5, 0], [*range(V)] * 3,
]  # fmt: skip
# Calls of os that a system may lack; the store then reads with a thread pool, or seeks.
LACKING: dict[str, tuple[str, ...]] = {
    "linux": (), "no advice": ("posix_fadvise",), "no positional read": ("preadv",),
    "windows": ("posix_fadvise", "preadv"),
}  # fmt: skip
WAYS: list[tuple[Way, str]] = [("pread", system) for system in LACKING]
# What holds for tables elsewhere, too.
FAR: list[tuple[Way, str]] = [("far", "linux"), ("memory", "linux")]
everywhere = pytest.mark.parametrize(("reads", "system"), [*WAYS, *FAR])


@pytest.fixture(autouse=True)
def lacking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what the system of this test lacks."""
    if "system" in request.fixturenames:
        for call in LACKING[request.getfixturevalue("system")]:
            monkeypatch.delattr(os, call, raising=False)


@pytest.fixture
def written(tmp_path: Path) -> U8:
    """Write a table store to tmp_path and return its records."""
    shape = (V, LAYOUT.record_nbytes)
    records = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    write_store(tmp_path, LAYOUT, records, PER_SHARD)
    return records


@everywhere
def test_records_are_what_was_written(reads: Way, system: str, written: U8, tmp_path: Path) -> None:
    with closing(open_way(tmp_path, FORMAT, reads)) as store:
        store.ahead(ids(*range(V)))
        assert store.counters() == RowCounters()
        read = [store.read(ids(*tokens)) for tokens in ORDERS]
    for found, tokens in zip(read, ORDERS, strict=True):  # they outlive the store
        assert found.dtype == np.uint8
        assert np.array_equal(found, written[tokens])


@pytest.mark.parametrize(
    "other",
    [
        {"records": V + 1}, {"layers": (1, 2)}, {"parts": ((64,),)}, {"row_type": "int4"},
        {"parts": ((16,), (16,))}, {"scale_type": "fp16"}, {"row_type": "fp16", "group_size": 0},
        {"group_size": 32}, {},
    ],
)  # fmt: skip
def test_store_of_another_layout_is_refused(
    other: dict[str, Any], written: U8, tmp_path: Path
) -> None:
    layout = msgspec.structs.replace(LAYOUT, **other)
    with pytest.raises(BundleError, match="as in the manifest"):
        open_store(tmp_path, TableFormat(tokens=layout.records, stored=layout, indexed=not other))


# Records 0 to 4 as int8, 5 to 10 as int4; 14 tokens.
RARE = msgspec.structs.replace(LAYOUT, records=6, row_type="int4")
INDEX = [10, 0, 3, 3, 5, 7, 1, 2, 4, 6, 8, 9, 10, 0]
MIXED = TableFormat(tokens=14, stored=LAYOUT, rare_tables=RARE, indexed=True)


@pytest.fixture
def mixed(tmp_path: Path) -> U8:
    """A mixed store in tmp_path; all its records as they are once read."""
    rng, rows = np.random.default_rng(3), []
    for _ in LAYOUT.layers:
        rows.append(rng.normal(size=(V, LAYOUT.row_width)).astype(np.float32))
    frequent, rare = (
        pack_records(LAYOUT, [row[:5] for row in rows]),
        pack_records(RARE, [row[5:] for row in rows]),
    )
    write_store(tmp_path, LAYOUT, frequent, PER_SHARD, INDEX, (RARE, rare))
    widened = widen(RARE, rare, MIXED.tables)
    for layer in range(len(LAYOUT.layers)):
        assert np.array_equal(LAYOUT.unpack(widened, layer), RARE.unpack(rare, layer))
    return np.concatenate([frequent, widened])


def test_opening_reads_of_each_shard_its_last_four_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index grows with the records, and where they lie is arithmetic."""
    layout = msgspec.structs.replace(LAYOUT, records=5000)
    format = write_store(tmp_path, layout, np.zeros((5000, layout.record_nbytes), np.uint8), 2000)
    pread, read = disk.pread, list[int]()

    def counted(descriptor: int, buffer: memoryview, offset: int) -> int:
        if disk.size(descriptor) > 1 << 16:
            read.append(len(buffer))
        return pread(descriptor, buffer, offset)

    monkeypatch.setattr(disk, "pread", counted)
    open_store(tmp_path, format).close()
    assert sum(read) == 3 * 4


@everywhere
def test_rare_records_are_widened(reads: Way, system: str, mixed: U8, tmp_path: Path) -> None:
    with closing(open_way(tmp_path, MIXED, reads)) as store:
        for numbers in ORDERS:
            assert np.array_equal(store.read(ids(*numbers)), mixed[numbers])
        assert store.records_of(np.arange(14)).tolist() == INDEX


@pytest.mark.parametrize(("reads", "system"), [*WAYS, ("far", "linux")])
@pytest.mark.parametrize("number", [2, 5, 10])
def test_damage_in_either_array_is_reported(
    reads: Way, system: str, number: int, mixed: U8, tmp_path: Path
) -> None:
    array, row = ("records", number) if number < 5 else ("rare_records", number - 5)
    stride = (LAYOUT if number < 5 else RARE).record_nbytes + 4
    path, offset = tmp_path / array / "c" / str(row // 4) / "0", row % 4 * stride
    flip_bit(path, offset + 7)
    with closing(open_way(tmp_path, MIXED, reads)) as store:
        with pytest.raises(RowReadError) as caught:
            store.read(ids(*range(V)))
        assert f"{path}: record {number} at byte {offset}: its crc32c" in str(caught.value)
        others = [n for n in range(V) if n != number]
        assert np.array_equal(store.read(ids(*others)), mixed[others])
