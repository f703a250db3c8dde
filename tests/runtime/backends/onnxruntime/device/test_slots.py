"""Slots of the row cache in a device's memory: batched and counted uploads in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from device_parts import BUNDLE, on_device, rows_over

from stem_edge.bundle.manifest import TABLES
from stem_edge.errors import OutOfMemoryError
from stem_edge.numerics.quantize import U8
from stem_edge.runtime.backends.onnxruntime.device.slots import DeviceSlots
from stem_edge.runtime.rows.store import open_store
from stem_edge.runtime.rows.table_rows import TableRows

COUNT = 40


@pytest.fixture
def slots() -> Iterator[DeviceSlots]:
    with on_device(slots=COUNT) as parts:
        assert parts.slots is not None
        assert parts.backend.memory.nbytes == COUNT * parts.slots.slot_nbytes
        yield parts.slots
    assert parts.backend.memory.nbytes == 0


def records(ids: list[int]) -> U8:
    assert BUNDLE.manifest.table_format is not None
    with open_store(BUNDLE.file(TABLES), BUNDLE.manifest.table_format) as store:
        return store.read(np.asarray(ids, np.int64))


def held(slots: DeviceSlots, slot: int) -> np.ndarray:
    """Words of all slabs of one slot."""
    values = [slots.inputs()[slab.name] for slab in slots.rows.slabs]
    return np.concatenate([value.numpy()[slot].view(np.int32) for value in values])


@pytest.mark.parametrize("staged", [False, True])
def test_records_go_into_their_slots_and_nowhere_else(slots: DeviceSlots, staged: bool) -> None:
    places, some = [8, 1, 4, 5, 7], records([7, 3, 500, 1200, 1])
    before = {slot: held(slots, slot) for slot in (0, 2, 3, 6)}
    slots.write(np.array(places), slots.stage(some) if staged else some)
    words = slots.rows.pack(some)
    assert all(np.array_equal(held(slots, at), words[n]) for n, at in enumerate(places))
    assert all(np.array_equal(held(slots, slot), left) for slot, left in before.items())
    slots.write(np.array([4]), records([9]))
    assert np.array_equal(held(slots, 4), slots.rows.pack(records([9]))[0])
    slots.write(np.array([], np.intp), records([5])[:0])
    assert slots.uploaded_rows == 6
    assert slots.uploaded_nbytes == 6 * (4 * slots.rows.words + 8)  # and an int64 for the slot


@pytest.mark.parametrize("after", [False, True])
def test_the_cache_believes_nothing_after_a_write_that_failed(
    slots: DeviceSlots, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write fails before the graph runs, or after."""
    rows, real = rows_over(BUNDLE, slots, overlap=True), ort.InferenceSession.run_with_iobinding
    assert isinstance(rows, TableRows)

    def fail(*given: Any) -> None:
        if after:
            real(*given)
        raise OutOfMemoryError("no memory")

    def check(numbers: list[int]) -> None:
        for number, slot in zip(numbers, rows.cache.find(np.array(numbers)).slots, strict=True):
            assert np.array_equal(held(slots, int(slot)), slots.rows.pack(records([number]))[0])

    try:
        first, following = np.array([10, 11, 12, 13]), np.array([12, 20, 21, 22, 23])
        rows.slots(first)
        rows.expect(following)
        monkeypatch.setattr(ort.InferenceSession, "run_with_iobinding", fail)
        with pytest.raises(OutOfMemoryError):
            rows.slots(following)
        monkeypatch.undo()
        every = np.r_[first, following]
        resident = np.setdiff1d(every, rows.cache.find(every).missing.numbers).tolist()
        assert 12 in resident and not {*resident} & {20, 21, 22, 23}
        check(resident)
        rows.slots(following)
        check(following.tolist())
    finally:
        rows.close()
