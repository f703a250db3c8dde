"""Tables: devices that fail while they are opened or checked, and the edges of what a record may hold."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from contract import refused
from faulty_disk import Failing, watch
from stores import check_shard, flip_bit, write_store
from test_limits_disk import open_files
from test_z_tables import FORMAT, LAYOUT, NOWHERE, RECORDS, STRIDE, index_of, root, shard

from stem_edge import disk, shards, table_check
from stem_edge.bundle import TABLES, Bundle
from stem_edge.errors import BundleError, InputError
from stem_edge.quantize import U8
from stem_edge.rows import RecordLayout
from stem_edge.runtime.flash import EmulatedFlash, FlashProfile
from stem_edge.runtime.store import open_store
from stem_edge.shards import open_grid
from stem_edge.table_check import check_tables
from stem_edge.table_store import TableFormat

__all__ = ["root"]  # the fixture
FLOATS = RecordLayout(records=3, layers=(2, 5), parts=((4,),), row_type="fp32")
LARGEST = float(np.finfo(np.float32).max)


class Closes:
    """disk.close, counted."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count, self._close = 0, disk.close
        patch.setattr(disk, "close", self)

    def __call__(self, descriptor: int) -> None:
        self.count += 1
        self._close(descriptor)


def bundle_of(folder: Path, format: TableFormat | None) -> Bundle:
    """A bundle whose manifest knows of tables only."""
    manifest: Any = type("Manifest", (), {"table_format": format})
    return Bundle(folder, manifest)


def good_records(layout: RecordLayout) -> U8:
    rows = [np.ones((layout.records, layout.row_width), np.float32) for _ in layout.layers]
    return layout.pack(rows)


def stored(folder: Path, layout: RecordLayout, records: U8, **more: Any) -> Bundle:
    return bundle_of(folder, write_store(folder / TABLES, layout, records, 2, **more))


def test_a_dense_model_has_no_tables_to_check(tmp_path: Path) -> None:
    check_tables(bundle_of(tmp_path, None))


def test_tables_of_another_bundle_are_not_checked(tmp_path: Path) -> None:
    stored(tmp_path, FLOATS, good_records(FLOATS))
    other = TableFormat(tokens=3, tables=msgspec.structs.replace(FLOATS, layers=(2, 6)))
    refused(lambda: check_tables(bundle_of(tmp_path, other)), BundleError, tmp_path / TABLES)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODEV])
@pytest.mark.parametrize("at", [0, 1])
def test_a_shard_that_cannot_be_read_while_it_is_opened(root: Path, number: int, at: int) -> None:
    grid = open_grid(root / "records", LAYOUT)
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, ["pread"], Failing(at, number, for_ever=True))
        closed = Closes(patch)
        refused(
            lambda: check_shard(grid, 1), BundleError, shard(root, 1), os.strerror(number), "device"
        )
    assert closed.count == 1
    check_shard(grid, 1)


@pytest.mark.parametrize("entries", [1, 2, 3, 7, 8])
def test_an_index_is_the_same_in_pieces(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two shards of seven places: ten records, so four places stay empty."""
    layout = msgspec.structs.replace(LAYOUT, records=10)
    grid = shards.ShardGrid(root=Path("x"), layout=layout, records_per_shard=7)
    monkeypatch.setattr(shards, "INDEX_PIECE_ENTRIES", entries)
    for number, count in ((0, 7), (1, 3)):
        pairs = [(place * STRIDE, STRIDE) for place in range(count)]
        pairs += [(NOWHERE, NOWHERE)] * (7 - count)
        assert grid.index_bytes(number) == index_of(*pairs)
        assert grid.shard_nbytes(number) == count * STRIDE + 7 * 16 + 4


def test_an_interrupt_while_a_shard_is_opened_gives_it_back(root: Path) -> None:
    grid = open_grid(root / "records", LAYOUT)

    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        watch(patch, ["pread"], interrupt)
        closed = Closes(patch)
        with pytest.raises(KeyboardInterrupt):
            grid.open_shard(0)
    assert closed.count == 1


@pytest.mark.parametrize("piece", [1, 2 * (FLOATS.record_nbytes + 4), 1 << 30])
def test_a_device_that_fails_while_records_are_checked(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, counted = stored(tmp_path, FLOATS, good_records(FLOATS)), list[int]()
    monkeypatch.setattr(table_check, "PIECE_NBYTES", piece)
    check_tables(bundle, counted.append)
    stride = FLOATS.record_nbytes + 4
    assert counted == ([stride] * 3 if piece == 1 else [2 * stride, stride])
    pread = disk.pread

    def fail(descriptor: int, buffer: memoryview, offset: int) -> int:
        if len(buffer) % stride == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(descriptor, buffer, offset)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "pread", fail)
        path = tmp_path / TABLES / "records" / "c" / "0" / "0"
        before = open_files()
        refused(lambda: check_tables(bundle), BundleError, path, "bytes at byte 0", "device")
        assert open_files() == before


def test_a_shard_that_is_cut_while_it_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, fill = stored(tmp_path, FLOATS, good_records(FLOATS)), disk.fill
    stride, calls = FLOATS.record_nbytes + 4, list[int]()

    def cut(descriptor: int, buffer: memoryview, offset: int) -> int:
        if len(buffer) % stride == 0:
            calls.append(offset)
            return fill(descriptor, buffer[:-1], offset)
        return fill(descriptor, buffer, offset)

    monkeypatch.setattr(disk, "fill", cut)
    said = f"{2 * stride - 1} of {2 * stride} bytes at byte 0"
    refused(lambda: check_tables(bundle), BundleError, said, "cut while it was read")
    assert calls == [0]


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        (LARGEST, True), (-LARGEST, True), (0.0, True), (np.inf, False), (-np.inf, False),
        (np.nan, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("record", "index", "column"), [(0, 0, 0), (2, 1, 3), (1, 0, 2)])
def test_the_largest_value(
    tmp_path: Path, value: float, valid: bool, record: int, index: int, column: int
) -> None:
    records = good_records(FLOATS)
    FLOATS.row_codes(records, index)[record, column] = value
    bundle = stored(tmp_path, FLOATS, records)
    if valid:
        check_tables(bundle)
        return
    said = [f"record {record} (token {record})", f"value {column} of layer {(2, 5)[index]}"]
    at = f"at byte {record % 2 * (FLOATS.record_nbytes + 4)}:"
    refused(lambda: check_tables(bundle), BundleError, *said, at)


@pytest.mark.parametrize("record", range(3))
@pytest.mark.parametrize("piece", [1, 1 << 30])
def test_a_damaged_record_in_any_piece(
    tmp_path: Path, record: int, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, stride = stored(tmp_path, FLOATS, good_records(FLOATS)), FLOATS.record_nbytes + 4
    path, at = tmp_path / TABLES / "records" / "c" / str(record // 2) / "0", record % 2 * stride
    flip_bit(path, at + stride - 5)
    monkeypatch.setattr(table_check, "PIECE_NBYTES", piece)
    said = [f"record {record} (token {record}) at byte {at}: its crc32c is"]
    refused(lambda: check_tables(bundle), BundleError, path, *said)


@pytest.mark.parametrize(("row_type", "half"), [("int8", 128), ("int4", 8)])
def test_the_largest_scale(tmp_path: Path, row_type: Any, half: int) -> None:
    """A code of up to half the range times it must be a number, too."""
    layout = RecordLayout(records=3, layers=(1,), parts=((32,),), row_type=row_type, group_size=16)
    largest = np.float32(LARGEST / half)
    for number, (value, valid) in enumerate(
        [
            (largest, True),
            (-largest, True),
            (np.nextafter(largest, np.float32(np.inf)), False),
            (np.nextafter(-largest, np.float32(-np.inf)), False),
        ]
    ):
        records = good_records(layout)
        layout.row_scales(records, 0)[1, 1] = value
        bundle = stored(tmp_path / str(number), layout, records)
        if valid:
            check_tables(bundle)
        else:
            refused(
                lambda bundle=bundle: check_tables(bundle),  # type: ignore[misc]
                BundleError,
                "record 1 (token 1)",
                "scale 1 of layer 1",
            )


@pytest.mark.parametrize(("index", "user"), [([0, 2, 1, 2], "token 1"), ([0, 1, 1, 0], "of no")])
def test_who_uses_a_record(tmp_path: Path, index: list[int], user: str) -> None:
    records = good_records(FLOATS)
    FLOATS.row_codes(records, 0)[2, 0] = np.nan
    bundle = stored(tmp_path, FLOATS, records, index=index)
    refused(lambda: check_tables(bundle), BundleError, f"record 2 ({user}")


def test_the_mean_size_of_a_record() -> None:
    wide = RecordLayout(records=4, layers=(1,), parts=((16,),), row_type="int8", group_size=16)
    rare = msgspec.structs.replace(wide, records=1, row_type="int4")
    assert TableFormat(tokens=4, tables=wide).mean_record_nbytes == 20
    mixed = TableFormat(tokens=9, tables=wide, rare_tables=rare, indexed=True)
    assert mixed.folders() == ["records", "rare_records", "index"]
    assert mixed.mean_record_nbytes == round((3 * 20 + 12) / 4)
    assert mixed.nbytes == 9 * 4 + 3 * (20 + 4 + 16) + (12 + 4 + 16)


def test_emulated_flash_is_waited_for(root: Path) -> None:
    """100 ms for each of five reads, one after the other."""
    flash = EmulatedFlash(FlashProfile(1e12, 0.1, 1))
    with open_store(root, FORMAT, flash=flash) as store:
        started = time.perf_counter()
        assert np.array_equal(store.read(np.arange(5)), RECORDS)
        assert time.perf_counter() - started >= 0.5


@pytest.mark.parametrize("reads", ["pread", "mmap"])
def test_advice_is_given_for_each_record_as_it_lies(
    root: Path, reads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised = list[tuple[int, int, int]]()
    monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", 3, raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_DONTNEED", 4, raising=False)
    monkeypatch.setattr(
        os, "posix_fadvise", lambda file, *advice: advised.append(advice), raising=False
    )
    with open_store(root, FORMAT, reads) as store:
        store.advise(np.array([3, 0]))
        assert advised == [(STRIDE, STRIDE, 3), (0, STRIDE, 3)]
        advised.clear()
        store.read(np.array([1]))  # one alone is read at once
        assert advised == []
        store.read(np.array([1, 2]))
        assert advised == [(STRIDE, STRIDE, 3), (0, STRIDE, 3)]


def test_what_was_read_wrongly_is_forgotten_before_it_is_read_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, pread = list[object](), disk.pread
    monkeypatch.setattr(os, "POSIX_FADV_DONTNEED", 4, raising=False)
    monkeypatch.setattr(
        os, "posix_fadvise", lambda file, *advice: done.append(advice), raising=False
    )

    def disturbed(descriptor: int, buffer: memoryview, offset: int) -> int:
        count = pread(descriptor, buffer, offset)
        buffer[0] ^= "read" not in done
        done.append("read")
        return count

    with open_store(root, FORMAT) as store:
        monkeypatch.setattr(disk, "pread", disturbed)
        assert np.array_equal(store.read(np.array([3])), RECORDS[[3]])
    assert done == ["read", (STRIDE, STRIDE, 4), "read"]


def test_one_read_needs_no_threads(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no advice, a pool reads, and only if there are several records."""
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    with open_store(root, FORMAT) as store:
        pool, mapped = store._pool, list[int]()
        assert pool is not None
        map_ = pool.map

        def noted(call: Any, jobs: Any) -> Any:
            mapped.append(len(jobs))
            return map_(call, jobs)

        monkeypatch.setattr(pool, "map", noted)
        store.read(np.array([1]))
        store.read(np.array([1, 2]))
        assert mapped == [2]
        refused(lambda: store.read(np.array([1, 9])), InputError, "record 9")
    with open_store(root, FORMAT) as store:
        assert (store.layout, store.tokens, store.index) == (LAYOUT, 5, None)
