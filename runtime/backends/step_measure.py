"""Times of steps of several tokens beside a step of one, and whether they compute the same bits."""

from __future__ import annotations

import contextlib
import time

import numpy as np

from stem_edge.errors import OutOfMemoryError
from stem_edge.numerics.quantize import F32, I32, I64
from stem_edge.runtime.backends.interface import (
    MOST,
    SIZES,
    Backend,
    BackendContext,
    NotFiniteError,
    StepCosts,
)

ROUNDS = 7  # the fastest of these counts, because whatever else the machine does only adds time


def measure_steps(backend: Backend, token_ids: I64, slots: I32) -> StepCosts:
    """Measure steps over made-up tokens with these slots, behind all but the last MOST of them.

    Raises what a step raises.
    """
    before = len(token_ids) - MOST
    context = backend.open_context(len(token_ids))

    def step(position: int, count: int, logits: int | None = None) -> F32:
        places = slice(position, position + count)
        context.begin(token_ids[places], position, apart=True)
        try:
            return context.finish(slots[places], count if logits is None else logits)
        except NotFiniteError:  # possible with made-up rows; takes as long
            return np.full((count, 1), np.nan, np.float32)

    step(0, before, 1)
    alone = np.concatenate([step(before + n, 1).copy() for n in range(MOST)])
    same = [np.array_equal(step(before, size), alone[:size]) for size in SIZES]
    least = dict.fromkeys((1, *SIZES), np.inf)
    for _ in range(ROUNDS):
        for size in least:
            step(before, 1)  # as in use: steps of other sizes come after steps of one
            started = time.perf_counter()
            step(before, size)
            least[size] = min(least[size], time.perf_counter() - started)
    times = (
        np.maximum.accumulate([*least.values()]) / least[1]
    )  # no step takes less than a smaller one
    first = token_ids[before : before + 1], slots[before : before + 1]
    return StepCosts(
        seconds=least[1],
        times=dict(zip(least, times.round(2).tolist(), strict=True)),
        same_bits=all(same),
        same_in_batches=_same_in_batches(backend, context, before, *first, step(before, 1).copy()),
    )


def _same_in_batches(
    backend: Backend, context: BackendContext, before: int, token: I64, slot: I32, alone: F32
) -> bool:
    """True if each of several sequences has the logits that it has alone."""
    with contextlib.suppress(NotFiniteError, OutOfMemoryError):  # a device takes memory at once
        batch = backend.open_batch(MOST, context.length)
        for n in range(1, MOST + 1):
            batch.join(context, before)
            batch.begin(0, token.repeat(n), np.full(n, before))
            if not np.array_equal(batch.finish(slot.repeat(n, 0)), alone.repeat(n, 0)):
                return False
        return True
    return False
