"""What a step of several tokens takes, beside a step of one, and whether it computes the same bits."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np

from stem_edge.numerics.quantize import F32

SIZES = (2, 4, 8)  # tokens of steps that are measured, and then taken
ROUNDS = 7


class StepCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Measured costs of decoding steps of several tokens."""

    seconds: float  # of a step of one token
    times: dict[int, float]  # tokens of a step -> its time beside that
    same_bits: bool  # whether a token's logits are those of a step of its own


def measure_steps(step: Callable[[int, int], F32], before: int) -> StepCosts:
    """Measure a backbone that has `before` tokens in a context with room for the largest step.

    step: computes n tokens at a position, whatever was there, and returns the logits [n, V] of
    each. Its tokens follow from the position.
    """
    alone = np.concatenate([step(before + n, 1).copy() for n in range(max(SIZES))])
    together = {size: step(before, size).copy() for size in SIZES}
    times: dict[int, list[float]] = {size: [] for size in (1, *SIZES)}
    for _ in range(ROUNDS):
        for size, taken in times.items():
            step(before, 1)  # as in use: steps of other sizes come after steps of one
            started = time.perf_counter()
            step(before, size)
            taken.append(time.perf_counter() - started)
    # The least, because whatever else the machine does only adds to it.
    seconds = {size: min(taken) for size, taken in times.items()}
    return StepCosts(
        seconds=seconds[1],
        times={size: round(seconds[size] / seconds[1], 2) for size in SIZES},
        same_bits=all(np.array_equal(found, alone[:size]) for size, found in together.items()),
    )
