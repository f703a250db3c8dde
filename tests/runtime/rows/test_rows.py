"""Rows, over a store in memory whose reads can be delayed and can fail."""

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from stores import MemoryStore, arrays_of, ids, resident

from stem_edge.errors import RowReadError
from stem_edge.numerics.quantize import I32, I64, U8
from stem_edge.runtime.rows.cache import RowCache
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.runtime.rows.table_rows import TableRows
from stem_edge.tables.packing import pack_records
from stem_edge.tables.rows import RecordLayout, RowLookup

V, SLOTS = 50, 4
LAYOUT = RecordLayout(records=V, layers=(1, 2), parts=((4,),), row_type="fp32")
THREAD = "stem-edge-prefetch"


def numbered(numbers: I64) -> U8:
    """Make records; record r holds the number r."""
    values = np.repeat(numbers.astype(np.float32)[:, None], LAYOUT.row_width, axis=1)
    return pack_records(LAYOUT, [values, values])


class FakeStore(MemoryStore):
    """A store whose reads wait at a gate, and of which `failures` fail."""

    def __init__(self, index: I32 | None = None) -> None:
        super().__init__(LAYOUT, numbered)
        if index is not None:
            self._index, self.tokens = index, len(index)
        self.failures, self.seconds = 0, 0.0
        self.gate = threading.Event()
        self.gate.set()

    def before(self, numbers: I64) -> None:
        assert self.gate.wait(10)
        time.sleep(self.seconds)
        if self.failures:
            self.failures -= 1
            raise RowReadError(f"read of {numbers.tolist()} failed")


Make = Callable[..., TableRows]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[TableRows] = []

    def rows_over(overlap: bool = True, slots: int = SLOTS, index: I32 | None = None) -> TableRows:
        made.append(
            TableRows(FakeStore(index), RowCache(ArraySlots(LAYOUT, slots)), overlap=overlap)
        )
        return made[-1]

    yield rows_over
    for rows in made:
        store_of(rows).gate.set()
        rows.close()


def store_of(rows: TableRows) -> FakeStore:
    store = getattr(rows.store, "base", rows.store)  # of edits
    assert isinstance(store, FakeStore)
    return store


def contents(rows: TableRows, slots: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> list[int]:
    """The records that are in these slots; every value of every layer must agree."""
    found = np.concatenate([codes[slots] for (codes,) in arrays_of(rows.cache).codes], axis=1)
    assert (found == found[:, :1]).all()
    tokens: list[int] = found[:, 0].astype(int).tolist()
    return tokens


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD)]


@pytest.mark.parametrize("seed", range(3))
def test_overlap_and_plain_count_the_same_hits_and_read_the_same_records(
    seed: int, make: Make
) -> None:
    rng = np.random.default_rng(seed)
    steps = [rng.zipf(1.3, rng.integers(1, SLOTS + 1)) % V for _ in range(200)]
    counted = []
    for overlap in (False, True):
        rows = make(overlap, slots=V)  # nothing is evicted, so no choice among equals
        for tokens in steps:
            rows.expect(tokens)
            rows.slots(tokens)
        read = sorted(token for tokens in store_of(rows).reads for token in tokens)
        counted.append((rows.cache.hits, rows.cache.misses, read))
    assert counted[0] == counted[1]


@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_records_of_later_steps_are_begun_and_not_read(
    overlap: bool, edited: bool, make: Make
) -> None:
    rows, steps = make(overlap), [ids(1, 2), ids(1, 5), ids(3, 5), ids(4)]
    if edited:
        steps[2] = np.concatenate([steps[2], rows.make([((6,), (7,))])])
        rows.release(steps[2][2:].tolist())
        steps[2] = steps[2][:2]
    for at, step in enumerate(steps):
        rows.expect(step, later=np.concatenate([ids(), *steps[at + 1 : at + 3]]))
        assert contents(rows, rows.slots(step)) == step.tolist()
    wait_until(lambda: store_of(rows).begun == ([[1, 3, 5], [3, 4, 5], [4]] if overlap else []))
    assert store_of(rows).reads == [[1, 2], [5], [3], [4]]


def test_only_wanted_records_of_a_submit_are_kept(make: Make) -> None:
    rows = make()
    rows.expect(ids(10, 11, 12, 13))
    assert contents(rows, rows.slots(ids(13, 1, 2, 11))) == [13, 1, 2, 11]
    assert resident(rows.cache) == {1, 2, 11, 13}
    assert store_of(rows).reads == [[10, 11, 12, 13], [1, 2]]


# Of 100 tokens, in no order: two of each record.
INDEX: I32 = np.random.default_rng(9).permutation(np.arange(2 * V) % V).astype(np.int32)


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_that_share_a_record_share_its_read_its_slot_and_its_count(
    overlap: bool, make: Make
) -> None:
    rows = make(overlap, index=INDEX)
    tokens = np.flatnonzero(INDEX == 7)
    rows.expect(tokens)
    slots = rows.slots(np.concatenate([tokens, tokens]))
    assert len(set(slots.tolist())) == 1
    assert store_of(rows).reads == [[7]]
    rows.slots(tokens[:1])
    assert (rows.cache.hits, rows.cache.misses) == (4, 1)


def values(rows: TableRows, slots: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> list[float]:
    """The first value of both layers, added."""
    first, second = (codes[slots][:, 0] for (codes,) in arrays_of(rows.cache).codes)
    found: list[float] = (first + second).tolist()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_edits_that_come_and_go_never_give_a_wrong_row(
    overlap: bool, seed: int, make: Make
) -> None:
    rows, rng = make(overlap, index=INDEX), np.random.default_rng(seed)
    alive: dict[int, tuple[int, float]] = {}  # stem id -> users, value
    for _ in range(600):
        one, two, three = (int(token) for token in rng.integers(0, 8, 3))
        lookup: RowLookup = ((one,), (two, three))
        (stem_id,) = rows.make([lookup]).tolist()
        value = float(INDEX[one] + (INDEX[two] + INDEX[three]) / 2)
        users, known = alive.get(stem_id, (0, value))
        assert known == value or stem_id < len(INDEX)
        alive[stem_id] = (users + 1, value)
        wanted = rng.choice(list(alive), min(len(alive), SLOTS)).tolist()
        rows.expect(ids(*wanted))
        if rng.random() < 0.9:
            assert values(rows, rows.slots(ids(*wanted))) == [alive[one][1] for one in wanted]
        while len(alive) > 6 or (rng.random() < 0.3 and alive):
            gone = int(rng.choice(list(alive)))
            users, value = alive.pop(gone)
            rows.release([gone] * users)
