"""The row cache: interrupts and memory. What leaves it, and when: tests/blackbox/test_choices.py."""

import tracemalloc
from functools import partial

import numpy as np
import pytest
from interrupts import interrupted
from stores import arrays_of, ids, resident

from stem_edge.bundle.footprint import BUCKET_NBYTES, LEAST_BUCKETS, SLOT_BOOKKEEPING_NBYTES
from stem_edge.limits import MAX_RECORDS
from stem_edge.numerics.quantize import I64, U8
from stem_edge.runtime.rows.cache import RowCache
from stem_edge.runtime.rows.rows import EMPTY
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.tables.packing import make_layout, pack_records

LAYOUT = make_layout(60, (1, 2, 5), ((32,),), "int4", 16)


def make_records() -> U8:
    """Make a record for each token."""
    rng = np.random.default_rng(5)
    shape = (LAYOUT.records, LAYOUT.row_width)
    return pack_records(LAYOUT, [rng.normal(size=shape).astype(np.float32) for _ in LAYOUT.layers])


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
    arrays = arrays_of(cache)
    for index in range(len(LAYOUT.layers)):
        codes, scales = arrays.codes[index][0][slots], arrays.scales[index][0][slots]
        assert np.array_equal(codes, LAYOUT.row_codes(records, index)[tokens])
        assert np.array_equal(scales, LAYOUT.row_scales(records, index)[tokens])


@pytest.mark.parametrize("later", [0, 1, 2, 3])
def test_an_interrupt_at_any_line_of_install_does_no_harm(later: int) -> None:
    """At no moment, and never later, may a slot claim rows that it does not hold."""
    records, line = make_records(), 0
    while True:
        cache = RowCache(ArraySlots(LAYOUT, 4))
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
