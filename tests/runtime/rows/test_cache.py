"""The row cache against a slow oracle made of dictionaries."""

import tracemalloc
from collections import Counter
from functools import partial

import numpy as np
import pytest
from interrupts import interrupted
from stores import arrays_of, ids, resident
from tiers import slow_but

from stem_edge.bundle.footprint import BUCKET_NBYTES, LEAST_BUCKETS, SLOT_BOOKKEEPING_NBYTES
from stem_edge.limits import MAX_RECORDS
from stem_edge.numerics.quantize import I64, U8
from stem_edge.runtime.rows.cache import AGEING_USES_PER_SLOT, RowCache
from stem_edge.runtime.rows.rows import EMPTY
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.tables.codecs import RowType
from stem_edge.tables.packing import make_layout, pack_records
from stem_edge.tables.rows import RecordLayout

V = 60


def layout_of(row_type: RowType, layers: tuple[int, ...], *parts: tuple[int, ...]) -> RecordLayout:
    return make_layout(V, layers, parts, row_type, 16)


LAYOUTS = {
    "int4": layout_of("int4", (1, 2, 5), (32,)), "int8": layout_of("int8", (0, 3), (48,)),
    "fp16": layout_of("fp16", (0, 2), (5,)), "fp32": layout_of("fp32", (4,), (3,)),
    "int4 matrices": layout_of("int4", (1, 2), (4, 16), (2, 32)),
    "fp32 matrices": layout_of("fp32", (1, 2), (4, 3), (3, 2)),
    "fp16 scales": make_layout(V, (1, 2), ((2, 32), (16,)), "int8", 16, "fp16"),
}  # fmt: skip
INT4 = LAYOUTS["int4"]
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def make_records(layout: RecordLayout) -> U8:
    """Make a record for each token."""
    rng = np.random.default_rng(5)
    shape = (layout.records, layout.row_width)
    return pack_records(layout, [rng.normal(size=shape).astype(np.float32) for _ in layout.layers])


def fetch(cache: RowCache, records: U8, tokens: I64) -> None:
    """Look up records as a step does."""
    found = cache.find(tokens)
    cache.use(tokens, found)
    if len(missing := found.missing):
        cache.install(found.missing, records[missing], found.slots)


def check_contents(cache: RowCache, records: U8) -> None:
    """Check that every cached token has its own slot, which holds its rows."""
    tokens = ids(*sorted(resident(cache)))
    slots = cache.find(tokens).slots
    assert len(set(slots.tolist())) == len(tokens)
    layout = cache.layout
    for index in range(len(layout.layers)):
        codes = np.hstack([part[slots] for part in arrays_of(cache).codes[index]])
        assert np.array_equal(codes, layout.row_codes(records, index)[tokens])
        if layout.quantized:
            scales = np.hstack([part[slots] for part in arrays_of(cache).scales[index]])
            assert np.array_equal(scales, layout.row_scales(records, index)[tokens])


class Oracle:
    """A plain aged LFU. The cache chooses among equal keys, so its victims are taken over."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.counts: Counter[int] = Counter()
        self.last_use: dict[int, int] = {}  # of those that are resident
        self.clock = self.hits = self.misses = self.uses = 0

    def use(self, tokens: list[int]) -> None:
        self.clock += 1
        self.misses += len(self.missing(tokens))
        self.hits += len(tokens) - len(self.missing(tokens))
        for token in tokens:
            self.counts[token] += 1
            if token in self.last_use:
                self.last_use[token] = self.clock
        self.uses += len(tokens)
        if self.uses >= AGEING_USES_PER_SLOT * self.slots:
            self.counts = Counter({token: n // 2 for token, n in self.counts.items()})
            self.uses = 0

    def missing(self, tokens: list[int]) -> list[int]:
        return sorted(set(tokens) - set(self.last_use))

    def install(self, tokens: list[int], keep: list[int], now: set[int]) -> None:
        evicted = set(self.last_use) - now
        candidates = sorted(self._key(token) for token in set(self.last_use) - set(keep))
        free = self.slots - len(self.last_use)
        expected = candidates[: max(0, len(tokens) - free)]
        assert sorted(self._key(token) for token in evicted) == expected
        assert now == set(self.last_use) - evicted | set(tokens)
        for token in evicted:
            del self.last_use[token]
        self.last_use |= dict.fromkeys(tokens, self.clock)

    def _key(self, token: int) -> tuple[int, int]:
        return self.counts[token], self.last_use[token]


@every_layout
@pytest.mark.parametrize("slots", [1, 7, 16, V])
@pytest.mark.parametrize("seed", slow_but([0], range(3)))
def test_random_streams_against_the_oracle(layout: RecordLayout, slots: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache, oracle, records = (
        RowCache(ArraySlots(layout, slots)),
        Oracle(slots),
        make_records(layout),
    )
    for step in range(150):
        tokens = (rng.zipf(1.3, rng.integers(1, slots + 1)) + step // 40) % V
        found = cache.find(tokens)
        cache.use(tokens, found)
        oracle.use(tokens.tolist())
        missing = found.missing
        assert missing.tolist() == oracle.missing(tokens.tolist())
        if len(missing):
            cache.install(found.missing, records[missing], found.slots)
            oracle.install(missing.tolist(), tokens.tolist(), resident(cache))
        check_contents(cache, records)
        assert set(tokens.tolist()) <= resident(cache)
        assert (cache.hits, cache.misses) == (oracle.hits, oracle.misses)
    assert cache.misses and cache.hits


@pytest.mark.parametrize("later", [0, 1, 2, 3])
def test_an_interrupt_at_any_line_of_install_does_no_harm(later: int) -> None:
    """At no moment, and never later, may a slot claim rows that it does not hold."""
    layout, records, line = INT4, make_records(INT4), 0
    while True:
        cache = RowCache(ArraySlots(layout, 4))
        fetch(cache, records, ids(1, 2, 3, 4))
        slots, missing = found = cache.find(ids(3, 10, 11))
        cache.use(ids(3, 10, 11), found)
        install = partial(cache.install, missing, records[[10, 11]], slots)
        ended = interrupted(install, line, lambda code: code.co_name in ("install", "_unlink"))
        check_contents(cache, records)
        rng = np.random.default_rng(later)
        for _ in range(30):
            tokens = rng.choice([1, 2, 3, 4, 10, 11, 12], rng.integers(1, 5))
            fetch(cache, records, tokens)
            assert set(tokens.tolist()) <= resident(cache)
            check_contents(cache, records)
        if not ended:
            break
        line += 1
    assert line > 8  # as many moments were tried


def test_memory_follows_from_the_slots_and_not_from_the_table() -> None:
    """N-gram tables have hundreds of millions of records."""
    layout = make_layout(MAX_RECORDS, (1,), ((16,),), "int8", 16)
    slots = ArraySlots(layout, 1 << 15)
    tracemalloc.start()
    cache = RowCache(slots)
    rng, read = np.random.default_rng(0), np.zeros((512, layout.record_nbytes), np.uint8)
    for _ in range(150):
        wanted = rng.integers(0, MAX_RECORDS, 512)
        found = cache.find(wanted)
        cache.use(wanted, found)
        cache.install(found.missing, read[: len(found.missing)], found.slots)
        assert EMPTY not in cache.find(wanted).slots
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    planned = BUCKET_NBYTES * LEAST_BUCKETS + SLOT_BOOKKEEPING_NBYTES * cache.slots
    assert cache.filled == cache.slots
    assert kept < planned < 4e6


@every_layout
def test_numbers_after_the_records_are_cached_and_forgotten(layout: RecordLayout) -> None:
    cache, records = RowCache(ArraySlots(layout, 4)), make_records(layout)
    more = np.concatenate([records, records[:2]])
    fetch(cache, more, ids(V, 3, V + 1))
    check = arrays_of(cache).codes[0][0]
    codes = layout.row_codes(records, 0)[:2, : layout.codes_width()]
    assert np.array_equal(check[cache.find(ids(V, V + 1)).slots], codes)
    cache.forget(ids(V, 3))
    assert cache.find(ids(V, V + 1, 3)).missing.tolist() == [3, V]
    before = cache.find(ids(V + 1)).slots
    fetch(cache, more, ids(7, 8, 9))  # into the empty slots, so that none is evicted
    assert cache.find(ids(V + 1)).slots == before
    check_contents(cache, records)
