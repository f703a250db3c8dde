"""A batch that steps its sequences one after the other, each in its own context.

It gains no speed, but each token has the bits that it has alone. Backends without a faster one use
it, and tests compare the others with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import BackendBatch, BackendContext


class PlainBatch(BackendBatch):
    """Contexts in their places."""

    copies = False

    def __init__(self) -> None:
        self._contexts: list[BackendContext] = []
        self._step: list[tuple[BackendContext, npt.NDArray[np.int64], int]] = []

    def join(self, context: BackendContext, tokens: int) -> None:
        self._contexts.append(context)

    def leave(self, place: int) -> None:
        self._step = []  # which would keep its context
        last = self._contexts.pop()
        if place < len(self._contexts):
            self._contexts[place] = last

    def begin(
        self, first: int, token_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> None:
        places = range(first, first + len(token_ids))
        self._step = [
            (self._contexts[place], token_ids[n : n + 1], int(positions[n]))
            for n, place in enumerate(places)
        ]

    def finish(self, slot_ids: npt.NDArray[np.int32]) -> F32:
        lines: Sequence[F32] = [
            self._one(*step, slot_ids[n : n + 1]) for n, step in enumerate(self._step)
        ]
        return np.concatenate(lines)

    @staticmethod
    def _one(
        context: BackendContext,
        token_id: npt.NDArray[np.int64],
        position: int,
        slot_id: npt.NDArray[np.int32],
    ) -> F32:
        context.begin(token_id, position)
        return context.finish(slot_id, 1).copy()
