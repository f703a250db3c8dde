"""The simulated row cache has the same hits as a model that runs the tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from installed import DEMO
from stores import rows_of

import stem_edge
from stem_edge.bundle.opening import open_bundle
from stem_edge.measuring.planning.hit_rates import from_counts, simulate, zipf_counts
from stem_edge.measuring.workload import DEFAULT_TEXT, read_ids
from stem_edge.numerics.quantize import I64
from stem_edge.runtime.rows.warm import Caches
from stem_edge.tables.token_counts import count_tokens

SLOTS = 64


@pytest.fixture(scope="module")
def text() -> I64:
    return np.array(read_ids(DEFAULT_TEXT, open_bundle(DEMO)), np.int64)


@pytest.mark.parametrize(("prompt", "overlap"), [(101, True), (129, False), (1, True)])
def test_it_equals_what_the_runtime_counts(text: I64, prompt: int, overlap: bool) -> None:
    ids = text[: prompt + 100]
    options = {"slots": SLOTS, "warm_start": False, "overlap": overlap, "context_length": 240}
    with stem_edge.load(DEMO, **options) as model:  # type: ignore[arg-type]
        engine, vocab_size = model.engine, model.config.vocab_size
        context = engine.open_context(len(ids))
        for _ in engine.process(context, ids[:prompt].tolist()):
            pass
        before = engine.rows.counters()
        for token in ids[prompt:]:
            step = np.array([token])
            engine.expect(step)
            engine.step(context, step)
        after, filled = engine.rows.counters(), engine.rows.cache.filled  # type: ignore[attr-defined]
        rate = simulate(ids, vocab_size, SLOTS, prompt=prompt, chunk=engine.chunk_tokens)
        assert rate == ((after.hits - before.hits) / 100, filled)
        assert after.hits + after.misses - before.hits - before.misses == 100


def test_a_warm_start_equals_that_of_the_runtime(text: I64) -> None:
    vocab_size = open_bundle(DEMO).manifest.model.vocab_size
    counts = count_tokens(text, vocab_size)
    with stem_edge.load(DEMO, slots=SLOTS, warm_start=False) as model:
        engine, rows = model.engine, rows_of(model)
        Caches(rows.cache, rows.store).fill(rows.cache.expect_counts(counts), 16)
        context = engine.open_context(100)
        for token in text[:100]:
            engine.step(context, np.array([token]))
        found = rows.counters().hits / 100, rows.cache.filled
    assert simulate(text[:100], vocab_size, SLOTS, counts) == found
    assert found[0] > simulate(text[:100], vocab_size, SLOTS)[0]


@pytest.mark.parametrize(
    ("ids", "slots", "options", "rate"),
    [
        ([1, 2, 1, 1, 3, 2], 8, {}, (3 / 6, 3)),
        ([1, 2, 1, 1, 3, 2], 8, {"prompt": 2, "chunk": 2}, (3 / 4, 3)),
        ([1, 2, 1, 1, 3, 2], 100, {}, (3 / 6, 3)),  # more slots than tokens there are
        ([1, 2, 1, 1, 3, 2], 1, {}, (1 / 6, 1)),
        ([], SLOTS, {}, (0, 0)),
        ([1, 2, 1], 8, {"prompt": 3, "chunk": 16}, (0, 2)),  # nothing comes after the prompt
        ([1, 2, 1], 8, {"prompt": 5, "chunk": 16}, (0, 2)),
        # Record 1 was read in part, record 2 whole.
        ([1, 2, 1, 2, 1], 8, {"prompt": 2, "chunk": 2, "splits": True}, (2 / 3, 2)),
    ],
)
def test_tokens_whose_hits_can_be_counted_by_hand(
    ids: list[int], slots: int, options: dict[str, Any], rate: tuple[float, int]
) -> None:
    assert simulate(np.array(ids, np.int64), 10, slots, **options) == rate


def test_more_slots_hit_more_often_in_real_text(text: I64) -> None:
    rates = [simulate(text, 1756, slots)[0] for slots in (4, 16, 64, 256, 1024)]
    assert rates == sorted(rates) and rates[-1] > rates[0]
    distinct = len(np.unique(text))
    assert rates[-1] == pytest.approx(1 - distinct / len(text))


def test_rates_from_counts() -> None:
    counts = np.array([0, 10, 60, 30], np.uint32)
    assert [from_counts(counts, slots) for slots in (0, 1, 2, 3, 9)] == [0, 0.6, 0.9, 1, 1]
    assert from_counts(np.zeros(4, np.uint32), 2) == 0
    huge = np.full(4, 2**32 - 1, np.uint32)
    assert from_counts(huge, 1) == 0.25


def test_assumed_counts_fall_as_zipf_says() -> None:
    counts = zipf_counts(1000)
    assert counts[0] == 1_000_000 and counts[9] == 100_000 and counts[999] == 1000
    rates = [from_counts(counts, slots) for slots in (1, 10, 100, 1000)]
    assert rates == sorted(rates) and rates[-1] == 1
