"""Records kept in the host's memory: reads always return what the store holds."""

import time
from functools import partial
from pathlib import Path
from types import CodeType

import numpy as np
import numpy.typing as npt
import pytest
from installed import DEMO
from interrupts import interrupted
from stores import MemoryStore, ids
from threads import together
from tiers import slow_but

from stem_edge.bundle.manifest import TABLES
from stem_edge.bundle.opening import open_bundle
from stem_edge.errors import RowReadError
from stem_edge.numerics.quantize import I64, U8
from stem_edge.runtime.rows.cache import RowCache
from stem_edge.runtime.rows.host_tier import HostTier
from stem_edge.runtime.rows.prefetch import Prefetcher
from stem_edge.runtime.rows.records import READ_AT_ONCE
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.runtime.rows.store import open_store
from stem_edge.runtime.rows.warm import Caches, counts_file, expected_records, fill
from stem_edge.system.user_folder import cache_folder
from stem_edge.tables.packing import pack_records
from stem_edge.tables.rows import RowLookup, make_layout
from stem_edge.tables.token_counts import write_counts

V = 200
LAYOUT = make_layout(V, (1, 3), ((32,),), "int8", 16)
VALUES = np.random.default_rng(3).normal(size=(2, V, 32)).astype(np.float32)
RECORDS: U8 = pack_records(LAYOUT, [VALUES[0], VALUES[1]])


class FakeStore(MemoryStore):
    """A store of RECORDS; reads of a number in `bad` fail."""

    def __init__(self) -> None:
        super().__init__(LAYOUT, lambda numbers: RECORDS[numbers])
        self.bad: set[int] = set()
        self.error: BaseException = RowReadError("shard 0: record 7: Input/output error")
        self.seconds, self.readers, self.most_readers = 0.0, 0, 0

    def before(self, numbers: I64) -> None:
        self.readers += 1
        self.most_readers = max(self.readers, self.most_readers)
        time.sleep(self.seconds)
        self.readers -= 1
        if self.bad & set(numbers.tolist()):
            raise self.error


def make(slots: int) -> tuple[HostTier, FakeStore]:
    store = FakeStore()
    return HostTier(store, slots), store


def kept(tier: HostTier) -> list[int]:
    """Return the numbers of the records in the tier, after comparing their contents."""
    every = np.arange(V)
    held = np.setdiff1d(every, tier._cache.missing(every))
    assert np.array_equal(tier._kept.records[tier._cache.slots_of(held)], RECORDS[held])
    found: list[int] = held.tolist()
    return found


def check(tier: HostTier, numbers: I64) -> None:
    assert np.array_equal(tier.read(numbers), RECORDS[numbers])


@pytest.mark.parametrize("slots", [1, 7, 40, V, 10 * V])
@pytest.mark.parametrize("seed", slow_but([0], range(3)))
def test_reads_are_those_of_the_store_and_each_record_is_kept_or_read(
    slots: int, seed: int
) -> None:
    rng, (tier, store), wanted = np.random.default_rng(seed), make(slots), 0
    assert tier.slots == min(slots, V)
    for _ in range(150):
        numbers = np.unique(rng.zipf(1.2, rng.integers(1, 120)) % V)
        before, store.reads = kept(tier), []
        tier.ahead(numbers, np.ones(len(numbers), np.bool_))
        check(tier, numbers)
        from_flash = sorted(number for read in store.reads for number in read)
        assert from_flash == store.begun[-1] == sorted(set(numbers.tolist()) - set(before))
        assert len(kept(tier)) <= tier.slots
        wanted += len(numbers)
    found = tier.counters()
    assert found.host_hits + found.host_misses == wanted
    assert found.host_misses * LAYOUT.record_nbytes == found.bytes_read == store.bytes_read


@pytest.mark.parametrize("numbers", [[], [5, 5], [9, 3, 9, 4, 3], [1, 2, 1]])
def test_numbers_may_be_any(numbers: list[int]) -> None:
    tier, _ = make(3)
    check(tier, ids(1, 2))
    for _ in range(3):
        check(tier, ids(*numbers))
        kept(tier)


def test_the_most_used_records_stay_if_not_all_fit() -> None:
    tier, store = make(2)
    tier.expect_counts(np.where(np.isin(np.arange(V), [7, 90]), 9, 0).astype(np.uint32))
    check(tier, np.arange(V))
    assert store.reads == [list(range(V))]
    assert kept(tier) == [7, 90]


def test_what_was_returned_is_the_callers() -> None:
    tier, _ = make(5)
    for numbers in (ids(1, 2), ids(1, 2), ids(1, 3)):
        tier.read(numbers)[:] = 0
        assert kept(tier) == sorted(set(kept(tier)))
    first = tier.read(ids(1, 2))
    check(tier, np.arange(100, 150))
    assert np.array_equal(first, RECORDS[[1, 2]])


@pytest.mark.parametrize("error", [RowReadError("bad"), KeyboardInterrupt(), MemoryError()])
@pytest.mark.parametrize("slots", [1, 50])
def test_a_read_that_fails_leaves_nothing_wrong(error: BaseException, slots: int) -> None:
    tier, store = make(slots)
    check(tier, ids(1, 2, 150))
    before, store.bad, store.error = kept(tier), {100}, error
    with pytest.raises(type(error)):
        tier.read(ids(100, 101))
    assert kept(tier) == before
    with pytest.raises(type(error)):  # in the second piece: the first is kept
        tier.read(np.arange(1, 100 + READ_AT_ONCE))
    assert 100 not in kept(tier)
    store.bad = set()
    check(tier, np.arange(1, 100 + READ_AT_ONCE))
    check(tier, ids(100, 101))


def within(code: CodeType) -> bool:
    """Select code that a read runs in the tier and its cache.

    Not `read` itself: tracing stops where a true interrupt cannot, before a lock is let go.
    """
    name = Path(code.co_filename).name
    return name in ("host_tier.py", "cache.py") and code is not HostTier.read.__code__


def test_an_interrupt_at_any_line_of_a_read_does_no_harm() -> None:
    line, ended = 0, True
    while ended:
        tier, _ = make(5)
        check(tier, ids(1, 2, 3, 4, 5))
        ended = interrupted(partial(tier.read, ids(2, 9, 10)), line, within)
        kept(tier)
        for numbers in (ids(9, 10), ids(1, 2, 3), ids(9), ids(20, 21, 22, 23, 24)):
            check(tier, numbers)
            kept(tier)
        line += 1
    assert line > 30


def test_threads_that_read_at_once_take_turns() -> None:
    tier, store = make(20)
    store.seconds = 0.001

    def run(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(30):
            check(tier, np.unique(rng.integers(0, 60, 10)))

    together([partial(run, seed) for seed in range(4)])
    assert store.most_readers == 1
    kept(tier)


@pytest.mark.parametrize("slots", [1, 30])
def test_memory_is_exactly_what_the_plan_counts(slots: int) -> None:
    tier, _ = make(slots)
    arrays = [*vars(tier._cache).values(), *vars(tier._kept).values()]
    nbytes = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
    assert nbytes == slots * (LAYOUT.record_nbytes + 17) + 8 * V


def test_it_closes_its_store() -> None:
    tier, store = make(3)
    tier.close()
    assert store.closed


def rows_over(slots: int, host_slots: int, overlap: bool = False) -> tuple[Prefetcher, FakeStore]:
    store = FakeStore()
    cache = RowCache(ArraySlots(LAYOUT, slots))
    return Prefetcher(HostTier(store, host_slots), cache, overlap=overlap), store


def check_slots(rows: Prefetcher, numbers: I64) -> None:
    slots, storage = rows.fetch(numbers), rows.cache.storage
    assert isinstance(storage, ArraySlots)
    for layer, (codes,) in enumerate(storage.codes):
        assert np.array_equal(codes[slots], LAYOUT.row_codes(RECORDS, layer)[numbers])


@pytest.mark.parametrize("overlap", [False, True])
def test_slots_are_filled_from_host_and_flash(overlap: bool) -> None:
    rows, store = rows_over(8, 30, overlap)
    rng, uses = np.random.default_rng(1), 0
    for _ in range(200):
        numbers = rng.zipf(1.3, rng.integers(1, 9)) % V
        rows.submit(numbers)
        check_slots(rows, numbers)
        uses += len(numbers)
    rows.close()
    found = rows.counters()
    assert found.hits + found.misses == uses
    assert found.host_hits > 0 and found.host_misses > 0
    assert found.host_hits + found.host_misses <= found.misses  # a record once a step
    assert found.host_misses * LAYOUT.record_nbytes == found.bytes_read == store.bytes_read
    assert (found.uploaded_rows, found.uploaded_bytes) == (0, 0)


def test_made_records_are_composed_of_what_the_host_has() -> None:
    rows, store = rows_over(2, 30)
    check_slots(rows, ids(1, 2))
    check_slots(rows, ids(3, 4))
    lookup: RowLookup = ((1, 2), (3,))
    stem_ids = rows.make([lookup])
    slots = rows.fetch(stem_ids)
    assert store.reads == [[1, 2], [3, 4]]
    assert isinstance(rows.cache.storage, ArraySlots)
    (codes,) = rows.cache.storage.codes[1]
    assert np.array_equal(codes[slots][0], LAYOUT.row_codes(RECORDS, 1)[3])


@pytest.mark.slow
def test_what_stays_on_the_device_leaves_the_host() -> None:
    """Two tiers have nearly as many hits as one of their total size."""
    rng = np.random.default_rng(0)
    stream = rng.permutation(V)[rng.zipf(1.4, 6000) % V]

    def from_flash(rows: Prefetcher) -> float:
        for number in stream.tolist():
            rows.fetch(ids(number))
        return rows.counters().bytes_read / LAYOUT.record_nbytes / len(stream)

    alone = [
        from_flash(Prefetcher(FakeStore(), RowCache(ArraySlots(LAYOUT, n)), overlap=False))
        for n in (20, 40)
    ]
    both = from_flash(rows_over(20, 20)[0])
    assert alone[1] <= both < alone[1] + 0.5 * (alone[0] - alone[1])


def caches_of(rows: Prefetcher) -> Caches:
    assert isinstance(rows.store, HostTier)
    return Caches(rows.cache, rows.store.flash, rows.store)


def test_filling_gives_the_best_to_the_device_and_the_next_to_the_host() -> None:
    rows, _ = rows_over(3, 4)
    caches_of(rows).fill(ids(50, 40, 30, 20, 10, 60, 70, 80), 2)
    assert not len(rows.cache.missing(ids(50, 40, 30)))
    assert isinstance(rows.store, HostTier)
    assert kept(rows.store) == [10, 20, 60, 70]
    found = rows.counters()
    assert (found.host_hits, found.host_misses, found.misses) == (0, 0, 0)
    check_slots(rows, ids(20, 70, 99))
    assert (rows.counters().host_hits, rows.counters().host_misses) == (2, 1)


def test_filling_ends_at_its_deadline() -> None:
    rows, store = rows_over(3, 4)
    caches_of(rows).fill(ids(1, 2, 3, 4), 2, deadline=0.0)
    assert store.reads == []


def test_filling_again_reads_nothing() -> None:
    rows, store = rows_over(3, 4)
    for _ in range(2):
        caches_of(rows).fill(np.arange(7), 10)
    assert store.reads == [[0, 1, 2], [3, 4, 5, 6]]


@pytest.mark.parametrize("host_slots", [0, 4, 5000])
def test_a_warm_start_fills_both(host_slots: int, tmp_path: Path) -> None:
    bundle = open_bundle(DEMO)
    format = bundle.manifest.table_format
    assert format is not None
    counts = np.zeros(format.tables.records, np.uint32)
    counts[:10] = np.arange(100, 0, -10)
    path = counts_file(cache_folder(tmp_path), bundle)
    path.parent.mkdir(parents=True)
    write_counts(path, counts)
    store = open_store(bundle.file(TABLES), format)
    tier = HostTier(store, host_slots) if host_slots else None
    rows = Prefetcher(tier or store, RowCache(ArraySlots(format.tables, 3)), overlap=False)
    wanted = expected_records(bundle, caches := Caches(rows.cache, store, tier), tmp_path)
    fill(caches, wanted, 2)
    rows.close()
    assert wanted.tolist() == list(range(min(10, 3 + host_slots)))
    assert not len(rows.cache.missing(np.arange(3)))
    if isinstance(tier, HostTier):
        lacking: npt.NDArray[np.int64] = tier._cache.missing(np.arange(10))
        assert lacking.tolist() == [0, 1, 2, *range(3 + host_slots, 10)]
        assert tier._cache.counts[3] > tier._cache.counts[2] == 0  # because the device holds them
