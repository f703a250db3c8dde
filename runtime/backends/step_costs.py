"""What a step of several tokens takes, beside a step of one, and whether it computes the same bits."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np

from stem_edge.numerics.quantize import F32

SIZES = (2, 4, 8)  # tokens of steps that are measured, and then taken
# Rounds go on until the two least times of each size differ by no more than this factor, because
# whatever else the machine does only adds to them; but not for ever.
AGREEING = 1.05
FEWEST_ROUNDS, MOST_SECONDS = 7, 10.0


class StepCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Measured costs of decoding steps of several tokens."""

    seconds: float  # of a step of one token
    times: dict[int, float]  # tokens of a step -> its time beside that
    same_bits: bool  # whether a token's logits are those of a step of its own


def measure_steps(step: Callable[[int, int], F32], before: int) -> StepCosts | None:
    """Measure a backbone that has `before` tokens in a context with room for the largest step.

    step: computes n tokens at a position, whatever was there, and returns the logits [n, V] of
    each. Its tokens follow from the position. None if the machine is too busy to measure anything.
    """
    alone = np.concatenate([step(before + n, 1).copy() for n in range(max(SIZES))])
    together = {size: step(before, size).copy() for size in SIZES}
    times: dict[int, list[float]] = {size: [] for size in (1, *SIZES)}
    deadline = time.monotonic() + MOST_SECONDS
    while not _agree(times):
        if time.monotonic() > deadline:
            return None
        for size, taken in times.items():
            step(before, 1)  # as in use: steps of other sizes come after steps of one
            started = time.perf_counter()
            step(before, size)
            taken.append(time.perf_counter() - started)
    # No step takes less than a smaller one.
    least = np.maximum.accumulate([min(taken) for taken in times.values()])
    return StepCosts(
        seconds=float(least[0]),
        times={size: round(float(t / least[0]), 2) for size, t in zip(times, least, strict=True)},
        same_bits=all(np.array_equal(found, alone[:size]) for size, found in together.items()),
    )


def _agree(times: dict[int, list[float]]) -> bool:
    least = [sorted(taken)[:2] for taken in times.values() if len(taken) >= FEWEST_ROUNDS]
    return len(least) == len(times) and all(b <= AGREEING * a for a, b in least)
