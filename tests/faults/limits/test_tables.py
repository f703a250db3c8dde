"""Limits of tables: devices that fail while opening or checking, and values of records."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from contract import judged, refused
from damaged_stores import FORMAT, LAYOUT, RECORDS, STRIDE, shard
from faulty_disk import Failing, watch
from open_files import open_files
from stores import check_shard, write_store

from stem_edge.bundle.manifest import TABLES
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import BundleError
from stem_edge.files import disk
from stem_edge.numerics.quantize import U8
from stem_edge.runtime.first_load.table_check import check_tables
from stem_edge.runtime.rows.store import open_store
from stem_edge.tables.packing import pack_records
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.shards import open_grid
from stem_edge.tables.store import TableFormat

FLOATS = RecordLayout(records=3, layers=(2, 5), parts=((4,),), row_type="fp32")
STRIDE_OF_FLOATS = FLOATS.record_nbytes + 4
LARGEST = float(np.finfo(np.float32).max)


def bundle_of(folder: Path, format: TableFormat | None) -> Bundle:
    """Make a bundle whose manifest describes only tables."""
    manifest: Any = type("Manifest", (), {"table_format": format})
    return Bundle(folder, manifest)


def good_records(layout: RecordLayout) -> U8:
    rows = [np.ones((layout.records, layout.row_width), np.float32) for _ in layout.layers]
    return pack_records(layout, rows)


def stored(folder: Path, layout: RecordLayout, records: U8, **more: Any) -> Bundle:
    return bundle_of(folder, write_store(folder / TABLES, layout, records, 2, **more))


def test_a_dense_model_has_no_tables_to_check(tmp_path: Path) -> None:
    check_tables(bundle_of(tmp_path, None))


def test_tables_of_another_bundle_are_not_checked(tmp_path: Path) -> None:
    stored(tmp_path, FLOATS, good_records(FLOATS))
    other = TableFormat(tokens=3, stored=msgspec.structs.replace(FLOATS, layers=(2, 6)))
    refused(lambda: check_tables(bundle_of(tmp_path, other)), BundleError, tmp_path / TABLES)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODEV])
def test_a_shard_that_cannot_be_read_while_it_is_opened(root: Path, number: int) -> None:
    grid = open_grid(root / "records", LAYOUT)
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, ["pread"], Failing(0, number, for_ever=True))
        said, before = [os.strerror(number), "device"], open_files()
        refused(lambda: check_shard(grid, 1), BundleError, shard(root, 1), *said)
        assert open_files() <= before
    check_shard(grid, 1)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EIO, "record 0 at byte 0: Input/output error"),
        (None, f"only {STRIDE_OF_FLOATS - 1} of {STRIDE_OF_FLOATS} bytes were read; the file"),
    ],
)
def test_a_shard_that_fails_or_is_cut_while_it_is_checked(
    tmp_path: Path, number: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, fill, before = stored(tmp_path, FLOATS, good_records(FLOATS)), disk.fill, open_files()

    def fail(descriptor: int, buffer: memoryview, offset: int) -> int:
        if len(buffer) % STRIDE_OF_FLOATS:  # of its index
            return fill(descriptor, buffer, offset)
        if number is not None:
            raise OSError(number, os.strerror(number))
        return fill(descriptor, buffer[:-1], offset)

    monkeypatch.setattr(disk, "fill", fail)
    path = tmp_path / TABLES / "records" / "c" / "0" / "0"
    refused(lambda: check_tables(bundle), BundleError, path, said)
    assert open_files() <= before


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
    said = [f"record {record} at", f"value {column} of layer {(2, 5)[index]}"]
    at = f"at byte {record % 2 * STRIDE_OF_FLOATS}:"
    judged(lambda: check_tables(bundle), valid, BundleError, *said, at)


@pytest.mark.parametrize(("row_type", "half"), [("int8", 128), ("int4", 8)])
def test_the_largest_scale(tmp_path: Path, row_type: Any, half: int) -> None:
    """The scale times the largest code must be finite, too."""
    layout = RecordLayout(records=3, layers=(1,), parts=((32,),), row_type=row_type, group_size=16)
    largest, infinite = np.float32(LARGEST / half), np.float32(np.inf)
    beyond = [np.nextafter(largest, infinite), np.nextafter(-largest, -infinite)]
    for number, value in enumerate([largest, -largest, 0, *beyond, np.nan, infinite, -infinite]):
        records = good_records(layout)
        layout.row_scales(records, 0)[1, 1] = value
        bundle = stored(tmp_path / str(number), layout, records)
        said = "record 1 at", "scale 1 of layer 1"
        judged(partial(check_tables, bundle), number < 3, BundleError, *said)


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
