"""Measuring steps of several tokens."""

from __future__ import annotations

import time

import numpy as np
import pytest

from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.step_costs import SIZES, measure_steps

SECONDS = {1: 0.002, 2: 0.003, 4: 0.005, 8: 0.009}


class Steps:
    """A step that takes its time, and rounds otherwise with several tokens if it shall."""

    def __init__(self, off_by: float) -> None:
        self.off_by = off_by

    def __call__(self, position: int, count: int) -> F32:
        time.sleep(SECONDS[count])
        places = np.arange(position, position + count, dtype=np.float32)
        return np.stack([places, places], axis=1) + np.float32(self.off_by * (count > 1))


@pytest.mark.parametrize("off_by", [0.0, 1e-3, np.nan])
def test_times_and_bits(off_by: float) -> None:
    found = measure_steps(Steps(off_by), 100)
    assert found is not None
    assert found.same_bits == (off_by == 0)
    assert list(found.times) == [1, *SIZES]
    assert 1 == found.times[1] < found.times[2] < found.times[4] < found.times[8] < 6
    assert 0.002 <= found.seconds < 0.01


def test_a_machine_too_busy_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)

    def step(position: int, count: int) -> F32:
        time.sleep(float(random.uniform(1e-3, 3e-2)))
        return np.zeros((count, 2), np.float32)

    monkeypatch.setattr("stem_edge.runtime.backends.step_costs.MOST_SECONDS", 0.5)
    monkeypatch.setattr("stem_edge.runtime.backends.step_costs.AGREEING", 1.0)
    assert measure_steps(step, 100) is None
