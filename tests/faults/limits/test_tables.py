"""Limits of tables: devices that fail while opening or reading."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from contract import refused
from damaged_stores import FORMAT, LAYOUT, RECORDS, STRIDE, shard
from faulty_disk import Failing, watch
from open_files import open_files
from stores import check_shard, write_store

from stem_edge.bundle.manifest import TABLES
from stem_edge.errors import BundleError, RowReadError
from stem_edge.files import disk
from stem_edge.runtime.rows.store import open_store
from stem_edge.tables.packing import pack_records
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.shards import open_grid

FLOATS = RecordLayout(records=3, layers=(2, 5), parts=((4,),), row_type="fp32")
STRIDE_OF_FLOATS = FLOATS.record_nbytes + 4


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
def test_a_shard_that_fails_or_is_cut_while_it_is_read(
    tmp_path: Path, number: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [np.ones((FLOATS.records, FLOATS.row_width), np.float32) for _ in FLOATS.layers]
    format = write_store(tmp_path / TABLES, FLOATS, pack_records(FLOATS, rows), 2)
    fill, before = disk.fill, open_files()

    def fail(descriptor: int, buffer: memoryview, offset: int) -> int:
        if len(buffer) % STRIDE_OF_FLOATS:  # of its index
            return fill(descriptor, buffer, offset)
        if number is not None:
            raise OSError(number, os.strerror(number))
        return fill(descriptor, buffer[:-1], offset)

    monkeypatch.setattr(disk, "fill", fail)
    path = tmp_path / TABLES / "records" / "c" / "0" / "0"
    with open_store(tmp_path / TABLES, format) as store:
        refused(lambda: store.read(np.arange(3)), RowReadError, path, said)
    assert open_files() <= before


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
