"""Sequences that decode together on the CPU, each in its place of arrays that they share.

A step of the sequences in places first..first+n-1 binds that part of the arrays, so nothing is
copied. Matrices are read once for all of them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import BackendBatch, BackendContext
from stem_edge.runtime.backends.onnxruntime.bound_graphs import BoundGraphs
from stem_edge.runtime.backends.onnxruntime.context import KvArrays, OrtContext, Place
from stem_edge.runtime.backends.onnxruntime.loaded import Loaded


class OrtBatch(BackendBatch):
    """Places for `size` sequences of up to `length` tokens; memory is taken as they fill.

    Raises OutOfMemoryError.
    """

    def __init__(self, loaded: Loaded, size: int, length: int) -> None:
        self._evens = loaded.rows != "any"
        self._size, self._kv = size, KvArrays(loaded, size + 1, length)
        self._graphs = BoundGraphs(loaded, length, self._kv.part)
        self._contexts: list[OrtContext] = []  # in their places
        self._joined: list[int] = []  # tokens that each had when it joined
        self._filled: list[int] = []  # tokens that each has now

    def join(self, context: BackendContext, tokens: int) -> None:
        place = len(self._contexts)
        if not isinstance(context, OrtContext) or place == self._size or tokens > self._kv.length:
            raise ValueError(
                f"{tokens} tokens of a {type(context).__name__} are to join {place} sequences; "
                f"expected up to {self._kv.length} of an OrtContext, and {self._size} sequences"
            )
        context.rest()  # because the batch has memory for its steps
        context.move(Place(self._kv, place), tokens)
        self._contexts.append(context)
        self._joined.append(tokens)
        self._filled.append(tokens)

    def leave(self, place: int) -> None:
        context = self._contexts[place]
        context.move(Place(context.kv), self._joined[place])
        last, joined, filled = self._contexts.pop(), self._joined.pop(), self._filled.pop()
        if place < len(self._contexts):
            last.move(Place(self._kv, place), filled)
            self._contexts[place], self._joined[place], self._filled[place] = last, joined, filled

    def begin(
        self, first: int, token_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> None:
        count = len(token_ids)
        # A step of some sequences alone, as after an error, must not write to the next one.
        padded = self._evens and count % 2 == 1 and first + count == len(self._contexts)
        places, dropped = positions.tolist(), list[int]()
        for place, position in enumerate(places, first):
            dropped.append(self._contexts[place].window.make_room(position, 1))
            self._filled[place] = position + 1
        self._graphs.begin(token_ids[:, None], places, dropped, first=first, padded=padded)

    def finish(self, slot_ids: npt.NDArray[np.int32]) -> F32:
        return self._graphs.finish(slot_ids[:, None], 1)
