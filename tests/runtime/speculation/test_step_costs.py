"""Measuring steps of several tokens, by a clock that only steps move."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, repeat
from typing import Any

import numpy as np
import pytest

from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends import step_measure
from stem_edge.runtime.backends.costs import MOST, SIZES, StepCosts
from stem_edge.runtime.backends.step_measure import MeasuredSteps

SECONDS = {1: 0.002, 2: 0.003, 4: 0.005, 8: 0.009}


class Steps:
    """Backend, context and batch, which round otherwise with several tokens if they shall."""

    length = 1 << 20

    def __init__(self, delays: Iterator[float], off_by: float = 0, batch_off_by: float = 0) -> None:
        self.now, self.delays, self.off_by, self.batch_off_by = 0.0, delays, off_by, batch_off_by

    def perf_counter(self) -> float:
        return self.now

    def open_context(self, length: int) -> Steps:
        return self

    def open_places(self, size: int, length: int) -> Steps:
        return self

    def kept(self, tokens: int) -> list[Any]:
        return [self]

    def restore(self, arrays: Any, tokens: int) -> None:
        """Take nothing."""

    join = restore

    def begin(self, contexts: Any, token_ids: Any, positions: Any, *, apart: bool = False) -> None:
        alone = len(contexts) == 1
        self.count = token_ids.size
        self.now += SECONDS.get(self.count, 1.0) * (1 + next(self.delays)) if alone else 0
        self.off = self.off_by if alone else self.batch_off_by

    def finish(self, slot_ids: Any, logits: int) -> F32:
        off = self.off if self.count > 1 else 0.0
        return np.stack([slot_ids, slot_ids], axis=1).astype(np.float32) + np.float32(off)


def measured(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> StepCosts:
    monkeypatch.setattr(step_measure, "time", steps)
    backend: Any = steps
    ids = np.arange(100 + MOST)
    return MeasuredSteps(backend, ids, ids.astype(np.int32)).costs()


@pytest.mark.parametrize(("off_by", "batch_off_by"), [(0, 0), (0, 1e-3), (1e-3, 0), (np.nan, 0)])
def test_times_and_bits(
    off_by: float, batch_off_by: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured(Steps(repeat(0.0), off_by, batch_off_by), monkeypatch)
    assert found.same_bits == (off_by == 0)
    assert found.same_in_batches == (batch_off_by == 0)
    assert found.times == {1: 1, 2: 1.5, 4: 2.5, 8: 4.5} and list(found.times) == [1, *SIZES]
    assert found.seconds == pytest.approx(0.002)
    # The fastest round counts, and no step takes less than a smaller one.
    found = measured(Steps(cycle([0.5, 0.0, 1.0, 0.25, 0.0])), monkeypatch)
    assert found.seconds == pytest.approx(0.002)
    assert sorted(found.times.values()) == list(found.times.values())
