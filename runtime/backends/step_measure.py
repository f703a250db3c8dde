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

# Rounds go on until the two least times of each size differ by no more than this factor, because
# whatever else the machine does only adds to them; but not for ever.
AGREEING = 1.05
FEWEST_ROUNDS, MOST_SECONDS = 7, 10.0


class Probe:
    """Steps over made-up tokens, after the `before` tokens that the context has already.

    token_ids, slots: of all positions, with room for the largest step. deep: more tokens that the context
    has, before which steps cost more; 0: none. batch_length: tokens that a
    sequence of a batch has room for. Default: the context's length, which devices demand.
    """

    def __init__(
        self,
        backend: Backend,
        context: BackendContext,
        token_ids: I64,
        slots: I32,
        before: int,
        batch_length: int | None = None,
        deep: int = 0,
    ) -> None:
        self._backend, self._context, self.before, self.deep = backend, context, before, deep
        self._batch_length = batch_length or context.length
        self._token_ids, self._slots = token_ids, slots

    def step(self, position: int, count: int, logits: int | None = None) -> F32:
        """Compute tokens at a position, whatever was there; return logits [logits, V], of all by default."""
        places = slice(position, position + count)
        self._context.begin(self._token_ids[places], position, apart=True)
        try:
            return self._context.finish(self._slots[places], count if logits is None else logits)
        except NotFiniteError:  # possible with placeholder rows; takes as long
            return np.full((count, 1), np.nan, np.float32)

    def attention(self, more: float, one: float) -> float:
        """Return what StepCosts.attention says, by the seconds that depth adds to the largest steps."""
        return round(max(0.0, more) / one / MOST / (self.deep - self.before), 6)

    def same_in_batches(self) -> bool:
        """Tell whether each of several sequences has the logits that it has alone."""
        alone, sizes = self.step(self.before, 1).copy(), range(2, MOST + 1)
        token, slot = self._token_ids[[self.before]], self._slots[[self.before]]
        with contextlib.suppress(NotFiniteError, OutOfMemoryError):  # a device takes it at once
            batch = self._backend.open_batch(max(sizes), self._batch_length)
            for _ in range(max(sizes)):
                batch.join(self._context, self.before)
            for n in sizes:
                batch.begin(0, token.repeat(n), np.full(n, self.before))
                if not np.array_equal(batch.finish(slot.repeat(n, 0)), alone.repeat(n, 0)):
                    return False
            return True
        return False


def measure_steps(probe: Probe) -> StepCosts:
    """Measure steps of several tokens."""
    step, before = probe.step, probe.before
    deep = _deep_seconds(probe)
    alone = np.concatenate([step(before + n, 1).copy() for n in range(MOST)])
    together = {size: step(before, size).copy() for size in SIZES}
    times: dict[int, list[float]] = {size: [] for size in (1, *SIZES)}
    deadline = time.monotonic() + MOST_SECONDS
    while not (sure := _agree(times)) and time.monotonic() < deadline:
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
        same_in_batches=probe.same_in_batches(),
        same_bits=all(np.array_equal(found, alone[:size]) for size, found in together.items()),
        sure=sure,
        attention=0.0
        if deep is None
        else probe.attention(deep - float(least[-1]), float(least[0])),
    )


def _deep_seconds(probe: Probe) -> float | None:
    """Return the time of the largest steps behind `deep` tokens, and go back to `before`."""
    if probe.deep <= probe.before:
        return None
    taken = list[float]()
    for _ in range(FEWEST_ROUNDS):
        started = time.perf_counter()
        probe.step(probe.deep, MOST)
        taken.append(time.perf_counter() - started)
    probe.step(0, probe.before, 1)  # one, because those of all would be the most that this takes
    return min(taken)


def _agree(times: dict[int, list[float]]) -> bool:
    least = [sorted(taken)[:2] for taken in times.values() if len(taken) >= FEWEST_ROUNDS]
    return len(least) == len(times) and all(b <= AGREEING * a for a, b in least)
