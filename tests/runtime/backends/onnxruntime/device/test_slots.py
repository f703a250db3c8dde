"""Slots of the row cache in a device's memory: batched and counted uploads in place."""

from __future__ import annotations

import numpy as np
import pytest
from device_parts import prefetcher
from installed import DEMO

from stem_edge.bundle.opening import open_bundle
from stem_edge.errors import BackendError, OutOfMemoryError
from stem_edge.graph.device.rows import Activations, DeviceRows
from stem_edge.graph.names import ROW_ZERO_POINTS, ROWS, row_codes, row_scales
from stem_edge.numerics.quantize import U8
from stem_edge.runtime.backends.onnxruntime.device import slots as device_slots
from stem_edge.runtime.backends.onnxruntime.device.loader import variant_graphs
from stem_edge.runtime.backends.onnxruntime.device.slots import DeviceSlots, piece_records
from stem_edge.runtime.backends.onnxruntime.memory import DeviceMemory
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU
from stem_edge.runtime.backends.onnxruntime.providers.session import BoundSession, open_session
from stem_edge.runtime.rows.cache import RowCache
from stem_edge.runtime.rows.store import open_store

BUNDLE = open_bundle(DEMO)
LAYOUT = BUNDLE.manifest.tables
assert LAYOUT is not None


def make(
    count: int, activations: Activations = "fp16", limit: int | None = None
) -> tuple[DeviceSlots, DeviceMemory]:
    assert LAYOUT is not None
    memory = DeviceMemory(CPU, limit=limit)
    session = open_session(variant_graphs(BUNDLE, activations)[ROWS], 1, [CPU])
    return DeviceSlots(DeviceRows(LAYOUT, activations), count, memory, session), memory


def records(ids: list[int]) -> U8:
    assert BUNDLE.manifest.table_format is not None
    store = open_store(BUNDLE.file("tables.zarr"), BUNDLE.manifest.table_format)
    try:
        return store.read(np.asarray(ids, np.int64))
    finally:
        store.close()


def held(slots: DeviceSlots, slot: int) -> np.ndarray:
    """Words of all slabs of one slot."""
    values = [slots.inputs()[slab.name] for slab in slots.rows.slabs]
    return np.concatenate([value.numpy()[slot].view(np.int32) for value in values])


@pytest.mark.parametrize("activations", ["fp32", "fp16"])
@pytest.mark.parametrize("staged", [False, True])
def test_records_go_into_their_slots_and_nowhere_else(
    activations: Activations, staged: bool
) -> None:
    slots, _ = make(9, activations)
    ids = [7, 3, 500, 1200, 1]
    before = {slot: held(slots, slot) for slot in (0, 2, 3, 6)}
    some = records(ids)
    slots.write(np.array([8, 1, 4, 5, 7]), slots.stage(some) if staged else some)
    words = slots.rows.pack(some)
    for place, expected in zip([8, 1, 4, 5, 7], words, strict=True):
        assert np.array_equal(held(slots, place), expected)
    assert all(np.array_equal(held(slots, slot), words) for slot, words in before.items())
    slots.write(np.array([4]), records([9]))
    assert np.array_equal(held(slots, 4), slots.rows.pack(records([9]))[0])
    assert np.array_equal(held(slots, 5), words[3])


def test_memory_is_what_the_slots_say() -> None:
    for activations in ("fp32", "fp16"):
        slots, memory = make(17, activations)
        assert memory.nbytes == 17 * slots.slot_nbytes == 17 * slots.rows.slot_nbytes
        slots.close()
        assert memory.nbytes == 0


def test_uploads_are_counted() -> None:
    slots, _ = make(9)
    slots.write(np.array([1, 2, 3]), records([5, 6, 7]))
    slots.write(np.array([4]), slots.stage(records([8])))
    slots.write(np.array([], np.intp), records([5])[:0])
    assert (slots.uploads, slots.uploaded_rows) == (2, 4)
    assert slots.uploaded_nbytes == 4 * (4 * slots.rows.words + 8)  # and an int64 for the slot


def test_large_batches_are_uploaded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    slots, _ = make(40)
    monkeypatch.setattr(device_slots, "PIECE_NBYTES", 7 * 4 * slots.rows.words + 3)
    assert piece_records(slots.rows, 40) == 7 and piece_records(slots.rows, 5) == 5
    runs, real = [], BoundSession.run

    def run(graph: BoundSession) -> None:
        runs.append(graph)
        real(graph)

    monkeypatch.setattr(BoundSession, "run", run)
    some = records(list(range(100, 130)))
    slots.write(np.arange(5, 35)[::-1], some)
    assert len(runs) == 5 and slots.uploads == 1 and slots.uploaded_rows == 30
    words = slots.rows.pack(some)
    assert all(np.array_equal(held(slots, 34 - i), words[i]) for i in range(30))
    monkeypatch.setattr(device_slots, "PIECE_NBYTES", 10)  # so that each record is uploaded alone
    slots.write(np.array([3, 0]), records([5, 6]))
    assert np.array_equal(held(slots, 0), slots.rows.pack(records([6]))[0])


def test_the_cache_believes_nothing_after_a_write_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots, _ = make(6)
    cache = RowCache(slots)
    rows = prefetcher(BUNDLE, cache, overlap=True)
    try:
        first = np.array([10, 11, 12, 13], np.int64)
        where = rows.fetch(first)
        real = BoundSession.run
        for after in (False, True):  # fail before the graph runs, and after

            def fail(graph: BoundSession, after: bool = after) -> None:
                if after:
                    real(graph)
                raise OutOfMemoryError("no memory")

            following = np.array([12, 20, 21, 22, 23], np.int64)
            rows.submit(following)
            monkeypatch.setattr(BoundSession, "run", fail)
            with pytest.raises(OutOfMemoryError):
                rows.fetch(following)
            monkeypatch.setattr(BoundSession, "run", real)
            resident = np.setdiff1d(np.r_[first, following], cache.missing(np.r_[first, following]))
            assert 12 in resident and not set(resident) & {20, 21, 22, 23}
            for number in resident:
                slot = int(cache.slots_of(np.array([number]))[0])
                assert np.array_equal(held(slots, slot), slots.rows.pack(records([number]))[0])
        found = rows.fetch(following)
        assert found[0] == where[2]
        for number, slot in zip(following, found, strict=True):
            assert np.array_equal(held(slots, int(slot)), slots.rows.pack(records([number]))[0])
    finally:
        rows.close()


def test_slots_that_do_not_fit_are_refused() -> None:
    with pytest.raises(OutOfMemoryError, match="for the row cache of 1,000 slots"):
        make(1000, limit=500_000)


def test_what_onnxruntime_refuses_is_an_error_of_ours() -> None:
    slots, _ = make(4)
    with pytest.raises(BackendError, match="while uploading rows to the device"):
        slots.write(np.array([4]), records([1]))  # there is no such slot


def test_slots_are_bound_as_graphs_declare_them() -> None:
    slots, _ = make(5, "fp16")
    graphs = variant_graphs(BUNDLE, "fp16")
    late = BoundSession(open_session(graphs["late"], 1, [CPU]))
    found = {n: value.numpy() for n, value in slots.inputs().items() if n in late.inputs}
    assert len(found) == 7
    assert found[row_codes(3)].dtype == np.uint8 and found[row_codes(3)].shape == (5, 384)
    assert found[row_scales(3)].dtype == np.float16 and found[row_scales(3)].shape == (5, 6)
    assert found[ROW_ZERO_POINTS].shape == (5, 6)
