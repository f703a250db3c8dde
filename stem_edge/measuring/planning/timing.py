"""Timing of kernels: sizes and numbers of runs that all engines share, and the rates found."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from stem_edge.runtime.engine import Engine

DEMO = Path(__file__).parents[2] / "demo_model"
MATRIX_SHAPE = (2048, 8192)
PROBE_SECONDS = 0.4
LEAST_RUNS, MOST_RUNS = 5, 200
DISTINCT_TOKENS = 8  # few, so that their rows are in memory, as most are in a real text


@dataclass(frozen=True)
class Rates:
    """Bytes a second that a decode step reads, and the time of what does not depend on bytes."""

    weights: float  # matrices of the layers
    head: float
    kv: float
    layer_seconds: float  # small operators of one layer, for one token
    source: str  # of these figures, in words


def steps_seconds(engine: Engine) -> float:
    """Return the seconds of a decode step, prefetching a row and choosing a token included."""
    context = engine.open_context(MOST_RUNS + 2)

    def step() -> None:
        ids = np.array([context.position % DISTINCT_TOKENS])
        engine.expect(ids)
        int(engine.step(context, ids)[0].argmax())

    return timed(step)


def timed(run: Callable[[], object]) -> float:
    """Return the median seconds of a run, after one that warms up."""
    run()
    times: list[float] = []
    while len(times) < LEAST_RUNS or (sum(times) < PROBE_SECONDS and len(times) < MOST_RUNS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return median(times)
