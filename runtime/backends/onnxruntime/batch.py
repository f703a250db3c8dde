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
from stem_edge.runtime.backends.onnxruntime.context import KvArrays, KvWindow, OrtContext
from stem_edge.runtime.backends.onnxruntime.loaded import Loaded


class OrtBatch(BackendBatch):
    """Places for `size` sequences of up to `length` tokens; memory is taken as they fill.

    Raises OutOfMemoryError.
    """

    copies = True

    def __init__(self, loaded: Loaded, size: int, length: int) -> None:
        self._evens = loaded.rows != "any"
        self._size, self._kv = size, KvArrays(loaded, size + size % 2, length)
        self._graphs = BoundGraphs(loaded, length, self._kv.part)
        self._windows: list[KvWindow] = []  # of each sequence
        self._filled: list[int] = []  # tokens of each sequence

    def join(self, context: BackendContext, tokens: int) -> None:
        place = len(self._filled)
        if not isinstance(context, OrtContext) or place == self._size or tokens > self._kv.length:
            raise ValueError(
                f"{tokens} tokens of a {type(context).__name__} are to join {place} sequences; "
                f"expected up to {self._kv.length} of an OrtContext, and {self._size} sequences"
            )
        self._kv.copy(place, context.kv, 0, tokens, context.window.dropped)
        window = self._kv.window(place)
        window.follow(context.window)
        self._windows.append(window)
        self._filled.append(tokens)

    def leave(self, place: int) -> None:
        last, tokens = len(self._filled) - 1, self._filled[-1]
        if place < last:
            self._kv.copy(place, self._kv, last, tokens, self._windows[last].dropped)
            self._windows[place].follow(self._windows[last])
            self._filled[place] = tokens
        self._windows.pop()
        self._filled.pop()
        self._kv.free(last)
        if place < last:
            self._kv.free(place, tokens)

    def begin(
        self, first: int, token_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> None:
        count = len(token_ids)
        # A step of some sequences alone, as after an error, must not write to the next one.
        padded = self._evens and count % 2 == 1 and first + count == len(self._filled)
        places, dropped = positions.tolist(), list[int]()
        for place, position in enumerate(places, first):
            dropped.append(self._windows[place].make_room(position, 1))
            self._filled[place] = position + 1
        self._graphs.begin(token_ids[:, None], places, dropped, first=first, padded=padded)

    def finish(self, slot_ids: npt.NDArray[np.int32]) -> F32:
        return self._graphs.finish(slot_ids[:, None], 1)
