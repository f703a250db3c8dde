"""Measuring steps of several tokens, by a clock that only steps move."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from typing import Any

import numpy as np
import pytest

from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends import step_measure
from stem_edge.runtime.backends.interface import SIZES, NotFiniteError
from stem_edge.runtime.backends.step_measure import Probe, measure_steps

SECONDS = {1: 0.002, 2: 0.003, 4: 0.005, 8: 0.009}


class Steps:
    """Backend, context and batch, which round otherwise with several tokens if they shall."""

    length = 1 << 20

    def __init__(self, delays: Iterator[float], off_by: float = 0, batch_off_by: float = 0) -> None:
        self.now, self.delays, self.off_by, self.batch_off_by = 0.0, delays, off_by, batch_off_by

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def open_batch(self, size: int, length: int) -> Steps:
        return Steps(repeat(0.0), off_by=self.batch_off_by)

    def join(self, context: Any, tokens: int) -> None:
        """Take nothing."""

    def begin(
        self, first: Any, token_ids: Any, positions: Any = None, *, apart: bool = False
    ) -> None:
        self.now += (
            SECONDS.get(len(first), 1.0) * (1 + next(self.delays)) if positions is None else 0
        )
        self.count = len(first) if positions is None else len(token_ids)

    def finish(self, slot_ids: Any, logits: int = 0, top: int = 0) -> F32:
        if np.isnan(self.off_by) and self.count > 1:
            raise NotFiniteError("as placeholder rows may give")
        off = self.off_by if self.count > 1 else 0.0
        return np.stack([slot_ids, slot_ids], axis=1).astype(np.float32) + np.float32(off)


def probe(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> Probe:
    monkeypatch.setattr(step_measure, "time", steps)
    backend: Any = steps
    ids = np.arange(120)
    return Probe(backend, backend, ids, ids.astype(np.int32), 100)


@pytest.mark.parametrize(
    ("off_by", "batch_off_by"), [(0.0, 0.0), (0.0, 1e-3), (1e-3, 0.0), (np.nan, 0.0)]
)
def test_times_and_bits(
    off_by: float, batch_off_by: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(repeat(0.0), off_by, batch_off_by)
    found = measure_steps(probe(steps, monkeypatch))
    assert found.sure
    assert found.same_bits == (off_by == 0)
    assert found.same_in_batches == (batch_off_by == 0)
    assert found.times == {1: 1, 2: 1.5, 4: 2.5, 8: 4.5} and list(found.times) == [1, *SIZES]
    assert found.seconds == pytest.approx(0.002)


def test_a_machine_too_busy_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_measure, "AGREEING", 0.0)
    found = measure_steps(probe(Steps(repeat(0.0)), monkeypatch))
    assert not found.sure and sorted(found.times.values()) == list(found.times.values())


def test_what_attention_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps before which there are 20 more tokens take 0.1 % of a step of one longer for each."""

    class Deep(Steps):
        def begin(self, first: Any, token_ids: Any, positions: Any = None, **apart: bool) -> None:
            super().begin(first, token_ids, positions)
            if positions is None and token_ids == 120:
                self.now += len(first) * 20 * 0.001 * SECONDS[1]

    steps: Any = Deep(repeat(0.0))
    monkeypatch.setattr(step_measure, "time", steps)
    ids = np.arange(128)
    measured = measure_steps(Probe(steps, steps, ids, ids.astype(np.int32), 100, deep=120))
    assert measured.attention == pytest.approx(0.001)
