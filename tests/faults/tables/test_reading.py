"""Catalogue Z12 to Z18: how tables are read. Their files: test_stores.py."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from changing import edit
from contract import refused
from damaged_stores import FORMAT, LAYOUT, RECORDS, STRIDE, shard
from faulty_disk import shorten
from loading import load_fixed
from stores import write_store

from stem_edge.errors import BundleError, InputError, RowReadError
from stem_edge.export.job.table_plan import EXPORT_ROWS, ExportRows
from stem_edge.export.tables import SHARD_NBYTES, make_grid
from stem_edge.files import disk
from stem_edge.runtime.rows.store import open_store
from stem_edge.runtime.rows.table_arrays import open_tables
from stem_edge.tables.codecs import RowType
from stem_edge.tables.packing import make_layout
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.store import TableFormat

EVERY = np.arange(5)


def test_z12_a_shard_that_is_cut_while_it_is_open(root: Path) -> None:
    with open_store(root, FORMAT) as store:
        os.truncate(shard(root, 1), STRIDE + 3)
        refused(
            lambda: store.read(EVERY), RowReadError, shard(root, 1), "record 3", "3 of 24 bytes"
        )
        others = np.array([0, 1, 2, 4])
        assert np.array_equal(store.read(others), RECORDS[others])


def test_z13_a_shard_that_is_replaced_while_it_is_open(root: Path, tmp_path: Path) -> None:
    newer = RECORDS[::-1].copy()
    with open_store(root, FORMAT) as store:
        write_store(tmp_path / "newer", LAYOUT, newer, 2)
        for number in range(3):
            shard(tmp_path / "newer", number).replace(shard(root, number))
        assert np.array_equal(store.read(EVERY), RECORDS)
    with open_store(root, FORMAT) as store:
        assert np.array_equal(store.read(EVERY), newer)


class Failing:
    """A disk.pread that fails the first `times` reads of one place."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, offset: int, times: int) -> None:
        self.offset, self.left, self.failed, self.pread = offset, times, 0, disk.pread
        monkeypatch.setattr(disk, "pread", self)

    def __call__(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        if offset == self.offset and self.left:
            self.left, self.failed = self.left - 1, self.failed + 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self.pread(descriptor, buffer, offset)


def test_z14_a_read_that_fails_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(root, FORMAT) as store:
        failing = Failing(monkeypatch, STRIDE, times=1)
        assert np.array_equal(store.read(EVERY), RECORDS)
        assert failing.failed == 1


def test_z14_a_read_that_fails_for_ever(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(root, FORMAT) as store:
        failing = Failing(monkeypatch, STRIDE, times=1000)
        refused(
            lambda: store.read(np.array([1])),
            RowReadError,
            shard(root, 0),
            f"record 1 at byte {STRIDE}: {os.strerror(errno.EIO)}",
        )
        assert failing.failed == 2  # retried once only
        neighbours = np.array([0, 2, 4])
        assert np.array_equal(store.read(neighbours), RECORDS[neighbours])


@pytest.mark.parametrize("most", [1, 7])
def test_z15_short_reads(root: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Reads interrupted by signals are continued by Python."""
    shorten(monkeypatch, most)
    with open_store(root, FORMAT) as store:
        assert np.array_equal(store.read(EVERY), RECORDS)
    with open_tables(root) as tables:
        assert np.array_equal(tables.records(EVERY), RECORDS)


def test_z16_a_hundred_thousand_shards(tmp_path: Path) -> None:
    """Such a store must have as many files, which are looked for before any is opened."""
    many = RecordLayout(
        records=100_000, layers=(1,), parts=((16,),), row_type="int8", group_size=16
    )
    write_store(tmp_path / "t", many, np.zeros((100_000, 20), np.uint8), 100_000)
    path = tmp_path / "t" / "records" / "zarr.json"
    edit(path, "chunk_grid configuration chunk_shape 0", 1)
    for call in (
        lambda: open_tables(tmp_path / "t").close(),
        lambda: open_store(tmp_path / "t", TableFormat(tokens=100_000, stored=many)).close(),
    ):
        refused(call, BundleError, tmp_path / "t")


OUTSIDE = [-1, 300, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
KINDS = [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64]
NO_IDS = [True, 1.0, np.float32(1), np.bool_(True), "1", None, 2**64, 10**30, 1 + 0j]


def test_z17_ids_that_no_token_has(tiny_bundle: Path) -> None:
    """-1 is not the last token, a bool is not an id, and a refusal changes nothing."""
    with load_fixed(tiny_bundle) as model:
        expected = model.logits([1, 2, 3])
        for token in [*OUTSIDE, *NO_IDS]:
            calls: list[Callable[[Any], object]] = [
                lambda token: model.logits([token]),
                lambda token: model.generate([1, token]),
                lambda token: model.generate_text([token]),
                lambda token: model.logits([1], stem_ids=[token]),
                lambda token: model.logits([1], stem_ids=[[token]]),
                lambda token: model.detokenize([token]),
            ]
            for call in calls:
                with pytest.raises(InputError, match="token id"):
                    call(token)
        assert np.array_equal(model.logits([1, 2, 3]), expected)
        for kind in KINDS:
            ids: Any = np.array([1, 2, 3], kind)
            assert np.array_equal(model.logits(ids), expected)


@pytest.mark.parametrize("token", [*OUTSIDE, *NO_IDS, [1], [[1], [1, 2]]], ids=repr)
def test_z17_ids_that_tables_do_not_have(tiny_bundle: Path, token: Any) -> None:
    with open_tables(tiny_bundle) as tables:
        if token != [1]:
            refused(lambda: tables[token, 1], InputError, "token id")
        refused(lambda: tables[[token], 1], InputError, "token id")
        refused(lambda: tables[[5, token], 1], InputError)


@pytest.mark.parametrize("tables", EXPORT_ROWS)
def test_z18_shards_are_smaller_than_fat32_allows(tmp_path: Path, tables: ExportRows) -> None:
    """This holds for all options, but not for backbones, which are one file each."""
    row_type: RowType = "int4" if tables == "mixed" else tables
    sizes = [(layers, width) for layers in (1, 16, 60) for width in (16, 64, 8192, 1 << 20)]
    for layers, width in sizes:
        for group in (16, 256):
            layout = make_layout(1 << 24, range(layers), ((width,),), row_type, group)
            grid = make_grid(tmp_path, layout, SHARD_NBYTES)
            assert max(grid.shard_nbytes(number) for number in (0, grid.shards - 1)) < 1 << 32


def test_z18_names_do_not_differ_only_in_case(tiny: Path) -> None:
    """Bundles can be copied to a case-insensitive file system."""
    names = [p.relative_to(tiny).as_posix() for p in tiny.rglob("*")]
    assert len({name.casefold() for name in names}) == len(names)
