"""Measures steps of several tokens: times, and if their logits equal those of one-token steps."""

from __future__ import annotations

import contextlib
import time
from functools import cached_property

import numpy as np

from stem_edge.errors import OutOfMemoryError
from stem_edge.numerics.quantize import F32, I32, I64
from stem_edge.runtime.backends.costs import MOST, SIZES, StepCosts
from stem_edge.runtime.backends.interface import Backend, BackendContext

ROUNDS = 4  # the fastest of these counts, because whatever else the machine does only adds time


class MeasuredSteps:
    """Measures decoding steps of 1 to MOST tokens at one position; compares bits with single-token steps.

    token_ids: any; all except the last MOST are only context. slots: row cache slot of each token.
    """

    def __init__(self, backend: Backend, token_ids: I64, slots: I32) -> None:
        self._backend, self._ids, self._slots = backend, token_ids, slots
        self._before = len(token_ids) - MOST
        self._context = backend.open_context(len(token_ids))
        self._step(0, self._before, 1)

    def _step(self, position: int, count: int, logits: int | None = None) -> F32:
        places = slice(position, position + count)
        self._backend.begin([self._context], self._ids[None, places], [position], apart=True)
        return self._backend.finish(self._slots[places], count if logits is None else logits)

    @cached_property
    def same_bits(self) -> bool:
        """True if steps of several tokens give the same logits, bit for bit, as single-token steps."""
        alone = [self._step(self._before + n, 1).copy() for n in range(MOST)]
        return all(
            np.array_equal(self._step(self._before, size), np.concatenate(alone[:size]))
            for size in SIZES
        )

    def seconds(self, size: int) -> float:
        """Return the time of a step of `size` tokens."""
        self._step(self._before, 1)  # as in use: steps of other sizes follow steps of one
        started = time.perf_counter()
        self._step(self._before, size)
        return time.perf_counter() - started

    def costs(self) -> StepCosts:
        least = dict.fromkeys((1, *SIZES), np.inf)
        for _ in range(ROUNDS):
            for size in least:
                least[size] = min(least[size], self.seconds(size))
        # No step takes less than a smaller one.
        times = np.maximum.accumulate([*least.values()]) / least[1]
        return StepCosts(
            seconds=least[1],
            times=dict(zip(least, times.round(2).tolist(), strict=True)),
            same_bits=self.same_bits,
            same_in_batches=self.same_in_batches,
        )

    @cached_property
    def same_in_batches(self) -> bool:
        """True if a sequence gets the same logits in a batch as alone, bit for bit."""
        before, alone = self._before, self._step(self._before, 1).copy()
        token, slot = self._ids[None, before : before + 1], self._slots[before : before + 1]
        with contextlib.suppress(OutOfMemoryError):  # a device allocates whole contexts at once
            places = self._backend.open_places(MOST, self._context.length)
            known, contexts = self._context.kept(before), list[BackendContext]()
            if places is None or not known:
                return False
            for n in range(1, MOST + 1):
                contexts.append(context := self._backend.open_context(self._context.length))
                context.restore(known, before)
                places.join(context, before)
                self._backend.begin(contexts, token.repeat(n, 0), [before] * n)
                if not np.array_equal(
                    self._backend.finish(slot.repeat(n, 0), 1), alone.repeat(n, 0)
                ):
                    return False
            return True
        return False
