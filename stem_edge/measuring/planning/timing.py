"""Timing kernels: what is computed, how often, and the rates that come of it."""

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
DISTINCT_TOKENS = 8  # so few that their rows are in memory, as most are in a real text


@dataclass(frozen=True)
class Rates:
    """Bytes a second that a decode step reads, and the time of what is not reading."""

    weights: float  # matrices of the layers
    head: float
    kv: float
    layer_seconds: float  # small operators of one layer, at one token
    source: str  # where these come from, in words


def steps_seconds(engine: Engine) -> float:
    """Seconds of a decode step, with what belongs to it: prefetching a row, choosing a token."""
    context = engine.open_context(MOST_RUNS + 2)

    def step() -> None:
        ids = np.array([context.position % DISTINCT_TOKENS])
        engine.expect(ids)
        int(engine.step(context, ids)[0].argmax())

    return timed(step)


def timed(run: Callable[[], object]) -> float:
    """Median seconds of a run, after one that warms up."""
    run()
    times: list[float] = []
    while len(times) < LEAST_RUNS or (sum(times) < PROBE_SECONDS and len(times) < MOST_RUNS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return median(times)
