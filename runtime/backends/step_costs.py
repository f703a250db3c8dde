"""What a step of several tokens takes, beside a step of one, and whether it computes the same bits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import msgspec
import numpy as np

from stem_edge.numerics.quantize import F32

SIZES = (2, 4, 8)  # tokens of steps that are measured, and then taken
ROUNDS = 5


class StepCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Measured costs of decoding steps of several tokens."""

    times: dict[int, float]  # tokens of a step -> its time; that of one token is 1
    # Whether a token's logits have the bits that they have in a step of its own, and the greatest
    # difference if not.
    same_bits: bool
    rounding: float


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
    seconds = {size: statistics.median(taken) for size, taken in times.items()}
    differences = [np.abs(found - alone[:size]).max() for size, found in together.items()]
    return StepCosts(
        times={size: round(seconds[size] / seconds[1], 2) for size in SIZES},
        same_bits=all(np.array_equal(found, alone[:size]) for size, found in together.items()),
        rounding=float(max(differences)),
    )
