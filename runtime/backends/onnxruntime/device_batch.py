"""Sequences that decode together in the memory of a device, each in its place of arrays.

The arrays are taken at once. A step of the sequences in places 0..n-1 binds their beginning, so nothing
is copied; others, which only a step that follows an error takes, are copied to arrays of their own
and back. A provider need not tell where within its memory an array lies, so a graph copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from stem_edge.graph import names as io
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import BackendBatch, BackendContext
from stem_edge.runtime.backends.onnxruntime.bound_graphs import BoundGraphs
from stem_edge.runtime.backends.onnxruntime.context import OrtContext
from stem_edge.runtime.backends.onnxruntime.device_memory import DeviceArray
from stem_edge.runtime.backends.onnxruntime.kv_arrays import KvArrays
from stem_edge.runtime.backends.onnxruntime.providers.session import (
    BoundSession,
    onnxruntime_errors,
)

if TYPE_CHECKING:
    from stem_edge.runtime.backends.onnxruntime.backend import OrtBackend

WORD = 4  # bytes


class DeviceBatch(BackendBatch):
    """Places for `size` sequences of up to `length` tokens. Raises OutOfMemoryError."""

    copies = True

    def __init__(self, backend: OrtBackend, size: int, length: int) -> None:
        self._backend, self._memory, self._size = backend, backend.memory, size
        self._kv = KvArrays(backend, size, length)
        self._graphs = BoundGraphs(backend, length)
        self._session = BoundSession(backend.sessions[io.COPY], in_place=backend.on_cpu)
        self._owned: list[object] = [self._kv, self._graphs, self._session]
        self.fixed_nbytes = self._kv.nbytes_of(length)
        self._count = 0  # of sequences
        self._bound: object = None  # what the graphs are bound to: a count, or arrays of some
        self._apart: KvArrays | None = None  # keys and values of the sequences of a step, and
        self._first = 0  # the place of their first

    def __del__(self) -> None:
        self._memory.retire(self._owned)  # not freed here: this may be any thread

    def join(self, context: BackendContext, tokens: int) -> None:
        place, wanted = self._count, self._kv.length
        if not isinstance(context, OrtContext) or place == self._size or tokens > wanted:
            raise ValueError(
                f"{tokens} tokens of a {type(context).__name__} are to join {place} sequences; "
                f"expected up to {wanted} of an OrtContext, and {self._size} sequences"
            )
        if tokens:
            if context.length != wanted:
                raise ValueError(f"the context has {context.length} tokens; expected {wanted}")
            self._copy(context.kv, [0], self._kv, [place])
        self._count += 1

    def leave(self, place: int) -> None:
        last = self._count - 1
        if place < last:
            self._copy(self._kv, [last], self._kv, [place])
        self._count = last

    def begin(
        self, first: int, token_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> None:
        count = len(token_ids)
        self._memory.collect()
        self._first, self._apart = first, None
        if first:
            self._apart = KvArrays(self._backend, count, self._kv.length)
            self._copy(self._kv, list(range(first, first + count)), self._apart, list(range(count)))
        if self._apart is not None or self._bound != count:
            self._bound = None  # so that the next step binds anew if this fails
            self._graphs.bind((self._apart or self._kv).beginning(count))
            self._bound = self._apart or count
        self._graphs.begin(token_ids[:, None], positions.tolist(), [0] * count)

    def finish(self, slot_ids: npt.NDArray[np.int32], top: int = 0) -> F32:
        try:
            return self._graphs.finish(slot_ids[:, None], 1, top)
        finally:
            if self._apart is not None:
                count, first = len(slot_ids), self._first
                places = list(range(first, first + count))
                self._copy(self._apart, list(range(count)), self._kv, places)
                self._apart = None

    def _copy(
        self, source: KvArrays, lines: list[int], target: KvArrays, places: list[int]
    ) -> None:
        """Copy keys and values of sequences to other places."""
        to = np.array(places, np.int64)[:, None]
        self._session.feed({io.FROM: np.array(lines, np.int64), io.TO: to})
        for found, array in zip(source.arrays, target.arrays, strict=True):
            values = {io.LINES: _words(found), io.PLACES: _words(array)}
            self._session.bind(values | {io.NEW + io.PLACES: values[io.PLACES]})
            with onnxruntime_errors("while keys and values were copied"):
                self._session.run()


def _words(array: DeviceArray) -> ort.OrtValue:
    """View an array [places, ...] as words [places, n]."""
    places = array.shape[0]
    return array.value(np.int32, (places, array.nbytes // places // WORD))
