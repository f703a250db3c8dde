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
from stores import check_shard

from stem_edge.errors import BundleError
from stem_edge.files import disk
from stem_edge.runtime.rows.store import open_store
from stem_edge.tables.shards import open_grid


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODEV])
def test_a_shard_that_cannot_be_read_while_it_is_opened(root: Path, number: int) -> None:
    grid = open_grid(root / "records", LAYOUT)
    with pytest.MonkeyPatch.context() as patch:
        watch(patch, ["pread"], Failing(0, number, for_ever=True))
        said, before = [os.strerror(number), "device"], open_files()
        refused(lambda: check_shard(grid, 1), BundleError, shard(root, 1), *said)
        assert open_files() <= before
    check_shard(grid, 1)


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
