"""Records kept on this machine's disk: reads return what the store holds, whatever became of the file."""

import errno
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from stores import MemoryStore, ids

from stem_edge.errors import InputError, RowReadError
from stem_edge.files import disk
from stem_edge.numerics.quantize import I64, U8
from stem_edge.runtime.rows import disk_tier
from stem_edge.runtime.rows.disk_tier import DiskTier, open_tier, parse_tier, tier_nbytes
from stem_edge.tables.rows import make_layout

V = 60
LAYOUT = make_layout(V, (1, 3), ((32,),), "int8", 16)
RECORDS: U8 = np.random.default_rng(3).integers(0, 256, (V, LAYOUT.record_nbytes), np.uint8)
EVERY, SLOT_NBYTES = np.arange(V), disk_tier.file_slot_nbytes(LAYOUT)


class FakeStore(MemoryStore):
    """A store of RECORDS; reads of a number in `bad` fail."""

    def __init__(self) -> None:
        super().__init__(LAYOUT, lambda numbers: RECORDS[numbers])
        self.bad: set[int] = set()

    def before(self, numbers: I64) -> None:
        if self.bad & set(numbers.tolist()):
            raise RowReadError("shard 0: record 7: check the network")

    @property
    def numbers(self) -> list[int]:
        """Numbers of the records read so far."""
        return [number for read in self.reads for number in read]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tier" / "key.rows"


def make(path: Path, slots: int = V) -> tuple[DiskTier, FakeStore]:
    store = FakeStore()
    return DiskTier(store, path, slots), store


def check(tier: DiskTier, numbers: I64) -> None:
    assert np.array_equal(tier.read(numbers), RECORDS[numbers])


def fetched(path: Path, numbers: I64, slots: int = V) -> list[int]:
    """Open a tier, read and check records, close it; return the numbers it fetched."""
    tier, store = make(path, slots)
    with closing(tier):
        check(tier, numbers)
    assert store.closed
    return sorted(store.numbers)


@pytest.mark.parametrize("slots", [1, 7, V, 10 * V])
def test_reads_are_those_of_the_store(path: Path, slots: int) -> None:
    rng, wanted = np.random.default_rng(slots), 0
    for _ in range(3):  # runs, of which each goes on from the one before
        tier, store = make(path, slots)
        assert tier.slots == min(slots, V)
        with closing(tier):
            for _ in range(60):
                numbers = rng.integers(0, V, rng.integers(0, 50)) ** 2 // V
                check(tier, numbers)
                wanted = tier.hits + tier.misses
            assert tier.misses == len(store.numbers)
            assert tier.bytes_read == tier.hits * SLOT_NBYTES
            assert wanted
    assert path.stat().st_size == min(slots, V) * SLOT_NBYTES


def test_a_restart_is_warm_and_keeps_what_was_used_most(path: Path) -> None:
    tier, _ = make(path, 3)
    with closing(tier):
        for number in [1, 2, 3, 1, 2, 3, 4, 1, 2, 4, 5]:
            check(tier, ids(number))
    assert fetched(path, ids(1, 2), 3) == []
    # Record 3 was used twice, and 6 and 7 once, so one of these leaves for the other.
    assert fetched(path, ids(6), 3) == [6]
    assert fetched(path, ids(7), 3) == [7]
    assert fetched(path, ids(1, 2), 3) == []


def test_another_size_keeps_what_has_room(path: Path) -> None:
    assert len(fetched(path, EVERY[:20], 20)) == 20
    assert len(fetched(path, EVERY[:20], 30)) == 0
    assert len(fetched(path, EVERY[:20], 5)) == 15
    assert path.stat().st_size == 5 * SLOT_NBYTES


def swap_slots(path: Path) -> None:
    data = path.read_bytes()
    slots = [data[at : at + SLOT_NBYTES] for at in range(0, len(data), SLOT_NBYTES)]
    path.write_bytes(b"".join(reversed(slots)))


def flip_all(path: Path) -> None:
    data = np.frombuffer(path.read_bytes(), np.uint8).copy()
    data[np.arange(V) * SLOT_NBYTES + np.arange(V) % SLOT_NBYTES] ^= 4
    path.write_bytes(data.tobytes())


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit of each slot": flip_all,
    "slots in another order": swap_slots,
    "zeros": lambda path: path.write_bytes(bytes(V * SLOT_NBYTES)),
    "cut": lambda path: os.truncate(path, SLOT_NBYTES // 2),
    "gone": lambda path: path.unlink(),
    "map cut": lambda path: os.truncate(path.with_suffix(".map"), 99),
    "map gone": lambda path: path.with_suffix(".map").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_only_costs_reads(path: Path, damage: str) -> None:
    fetched(path, EVERY)
    DAMAGES[damage](path)
    assert fetched(path, EVERY) == EVERY.tolist()
    assert fetched(path, EVERY) == []


def test_a_map_that_is_older_than_the_file_misleads_nobody(path: Path) -> None:
    """As after a crash: slots were given to others since the map was saved."""
    fetched(path, EVERY[:10], 10)
    older = path.with_suffix(".map").read_bytes()
    for number in range(10, 40):
        fetched(path, ids(number, number), 10)
    path.with_suffix(".map").write_bytes(older)
    assert fetched(path, EVERY[:10], 10)
    assert fetched(path, EVERY[:10], 10) == []


def test_a_second_process_reads_and_adds_nothing(path: Path) -> None:
    fetched(path, EVERY[:10])
    first, _ = make(path)
    kept = path.with_suffix(".map").read_bytes()
    with closing(first):
        assert fetched(path, EVERY[:20]) == list(range(10, 20))
        assert fetched(path, EVERY[:20]) == list(range(10, 20))
        assert path.with_suffix(".map").read_bytes() == kept
        check(first, EVERY[20:30])
    assert fetched(path, EVERY[:30]) == list(range(10, 20))


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A disk that takes so many writes more."""
    left, pwrite = [10**9], disk.pwrite

    def limited(descriptor: int, data: memoryview, offset: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(disk, "pwrite", limited)
    yield left


def test_a_full_disk_is_told_once_and_reads_go_on(path: Path, full: list[int]) -> None:
    tier, store = make(path)
    with closing(tier), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check(tier, EVERY[:10])
        full[0] = 5
        for _ in range(3):
            check(tier, EVERY)
    assert [str(w.message) for w in said if "No space left" in str(w.message)] == [
        str(said[0].message)
    ]
    assert f"{path}" in str(said[0].message)
    assert set(store.numbers[10:]) == set(range(10, V))
    full[0] = 10**9
    assert not set(range(10)) & set(fetched(path, EVERY))


def test_a_folder_that_cannot_be_written_leaves_the_store_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    store = FakeStore()
    with pytest.warns(RuntimeWarning, match="disk_tier=0"):
        assert open_tier(store, tmp_path / "file" / "key.rows", 10**6) is store
    assert open_tier(store, tmp_path / "other" / "key.rows", SLOT_NBYTES - 1) is store


def test_a_bad_block_is_fetched_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched(path, EVERY)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    tier, store = make(path)
    with closing(tier):
        monkeypatch.setattr(disk, "fill", broken)
        check(tier, ids(5, 6))
        monkeypatch.undo()
        check(tier, ids(5, 6, 7))
    assert store.numbers == [5, 6]


def test_a_read_that_fails_leaves_the_tier_right(path: Path) -> None:
    tier, store = make(path, 8)
    with closing(tier):
        check(tier, EVERY[:5])
        store.bad = {7}
        for _ in range(2):
            with pytest.raises(RowReadError):
                tier.read(ids(1, 7, 9))
        store.bad = set()
        for _ in range(3):
            check(tier, ids(1, 7, 9))


def test_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [parse_tier(size) for size in (0, "0", "2MB", 10**9)] == [0, 0, 2 * 10**6, 10**9]
    for wrong in (-1, "x", "", "1"):
        with pytest.raises(InputError, match="disk_tier"):
            parse_tier(wrong)
    big = make_layout(10**6, (1, 3), ((2048,),), "int8", 64)
    for free, usual in ((10**12, 10**9), (10**9, 10**8)):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        assert tier_nbytes(None, tmp_path / "not" / "yet", big) == usual
    path = tmp_path / "tier"
    path.write_bytes(bytes(1 << 20))  # counts as free, so that the size stays what it was
    assert tier_nbytes(None, path, big) == (10**9 + (1 << 20)) // 10
    assert tier_nbytes("1GB", tmp_path, LAYOUT) == V * SLOT_NBYTES
