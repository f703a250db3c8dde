"""Composed records: interrupts, memory, threads and damage. What they hold: tests/blackbox/test_edits.py."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import CodeType

import numpy as np
import pytest
from interrupts import interrupted
from loading import load_fixed
from stores import write_store

from stem_edge.numerics.quantize import I64, U8
from stem_edge.runtime.rows.cache import RowCache
from stem_edge.runtime.rows.edits import EditedStore
from stem_edge.runtime.rows.rows import EditRow
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.runtime.rows.store import open_store
from stem_edge.runtime.rows.table_rows import TableRows
from stem_edge.tables.composing import compose
from stem_edge.tables.packing import pack_records
from stem_edge.tables.rows import RecordLayout, RowLookup

V, LAYERS, WIDTH, SLOTS = 20, (1, 4), 8, 4
LAYOUT = RecordLayout(records=V, layers=LAYERS, parts=((WIDTH,),), row_type="fp32")


def make_records() -> U8:
    rng = np.random.default_rng(3)
    return pack_records(LAYOUT, [rng.normal(size=(V, WIDTH)).astype(np.float32) for _ in LAYERS])


RECORDS = make_records()


def mean_of(*tokens: int) -> RowLookup:
    return (tokens, tokens)


def mixed(one: int, two: int) -> RowLookup:
    return ((one,), (two,))


def expected(lookup: RowLookup) -> bytes:
    """Compute what a composed record must hold."""
    return compose(LAYOUT, lookup, dict(enumerate(RECORDS))).tobytes()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EditedStore]:
    format = write_store(tmp_path / "tables.zarr", LAYOUT, RECORDS, 7)
    edited = EditedStore(open_store(tmp_path / "tables.zarr", format))
    yield edited
    edited.base.close()


def ids(rows: list[EditRow]) -> I64:
    return np.array([row.row_id for row in rows], np.int64)


def keeps_numbers(code: CodeType) -> bool:
    return code.co_filename.endswith(("edits.py", "table_rows.py", "cache.py"))


def test_an_interrupt_anywhere_leaves_no_number_with_another_record(store: EditedStore) -> None:
    for at in itertools.count():
        slots = ArraySlots(LAYOUT, SLOTS)
        rows = TableRows(store.base, RowCache(slots), overlap=False)
        first = rows.make([mixed(1, 2), mixed(2, 3)])
        rows.slots(ids(first))
        del first
        ended = interrupted(partial(rows.make, [mixed(3, 4), mean_of(5, 6)]), at, keeps_numbers)
        for lookups in ([mixed(7, 8), mixed(1, 2)], [mean_of(5, 6), mixed(3, 4), mixed(9, 1)]):
            made = rows.make(lookups)
            assert len(set(ids(made))) == len(lookups)
            for slot, lookup in zip(rows.slots(ids(made)), lookups, strict=True):
                record = np.frombuffer(expected(lookup), np.uint8)[None]
                for layer, parts in enumerate(slots.codes):
                    assert np.array_equal(parts[0][slot], LAYOUT.row_codes(record, layer)[0])
        if not ended:
            assert at > 10
            return


@pytest.mark.parametrize("index", [None, [*range(V), *range(10)]], ids=["", "shared"])
def test_a_thousand_edits_take_the_memory_of_one(index: list[int] | None, tmp_path: Path) -> None:
    format, rng = write_store(tmp_path / "t", LAYOUT, RECORDS, 7, index), np.random.default_rng(0)
    with open_store(tmp_path / "t", format) as base:
        rows = TableRows(base, RowCache(ArraySlots(LAYOUT, SLOTS)), overlap=False)
        for _ in range(1000):
            lookup = (tuple(rng.integers(0, V, 3).tolist()), tuple(rng.integers(0, V, 2).tolist()))
            (made,) = rows.make([lookup])
            rows.slots(ids([made]))
        assert rows.made == 1


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice")
def test_records_of_a_prompt_are_begun_ahead_after_an_edit_as_before(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advised, advise = list[int](), os.posix_fadvise

    def noted(*given: int) -> None:
        advised.append(given[1])
        advise(*given)

    monkeypatch.setattr(os, "posix_fadvise", noted)
    with load_fixed(tiny_bundle, threads=1, slots=30) as model:
        counts = []
        for seed in (0, 1):
            advised.clear()
            model.logits(np.random.default_rng(seed).permutation(300)[:120].tolist())
            counts.append(len(advised))
            model.logits([1, 2, 3], stem_ids=[[4, 5], 2, 3])
    assert counts[1] > 0.9 * counts[0] > 120
