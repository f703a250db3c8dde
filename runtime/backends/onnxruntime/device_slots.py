"""The row cache's slots in the memory of a device.

A step's missing records are packed into words and go over in one batch, into all layers' slabs at
once: a graph puts them into place, and touches nothing else of the slabs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from stem_edge.graph import names as io
from stem_edge.graph.device_rows import WORD, DeviceRows
from stem_edge.numerics.quantize import I32, U8
from stem_edge.runtime.backends.onnxruntime.device_memory import DeviceMemory
from stem_edge.runtime.backends.onnxruntime.providers.session import (
    BoundSession,
    onnxruntime_errors,
)

# A batch goes over in pieces of so much, or of one record, so that what it takes meanwhile is known.
PIECE_NBYTES = 32 << 20
UPLOADING = "while rows went to the device"


class DeviceSlots:
    """Slots [count] of `rows` in `memory`, which the graph "rows" of a session fills.

    Raises OutOfMemoryError.
    """

    def __init__(
        self, rows: DeviceRows, count: int, memory: DeviceMemory, session: ort.InferenceSession
    ) -> None:
        self.layout, self.rows, self.count = rows.layout, rows, count
        self.uploads = 0  # batches
        self.uploaded_rows = 0  # records: the rows of one token in all layers
        self.uploaded_nbytes = 0
        self._graph = BoundSession(session)
        what = f"the row cache of {count:,} slots"
        self._inputs: dict[str, ort.OrtValue] = {}
        for slab in rows.slabs:
            array = memory.empty((count, slab.words), np.int32, what)
            self._graph.bind({slab.name: array.value(), io.NEW + slab.name: array.value()})
            self._inputs[slab.name] = array.value(slab.dtype, (count, slab.width))
        if self.layout.quantized:
            points = memory.put(rows.zero_points(count), what)
            self._inputs[io.ROW_ZERO_POINTS] = points.value()
        self._memory, self._pinned = memory, memory.pinned((0, rows.words), np.int32)

    @property
    def slot_nbytes(self) -> int:
        """See Slots.slot_nbytes."""
        return self.rows.slot_nbytes

    def stage(self, records: U8) -> I32:
        """Records [n, record_nbytes] as words [n, words], as they lie in slots.

        That can be done before it is known which slots they get; safe in any thread.
        """
        return self.rows.pack(records)

    def write(self, slots: npt.NDArray[np.intp], records: U8 | I32) -> None:
        """See Slots.write; records as they are, or words int32 that `stage` made of them.

        Raises OutOfMemoryError, DeviceLostError, BackendError: what these slots hold is then not
        known, and the others hold what they held.
        """
        size = piece_records(self.rows, self.count)
        for start in range(0, len(slots), size):
            piece = records[start : start + size]
            words = piece if piece.dtype == np.int32 else self.rows.pack(piece.view(np.uint8))
            ids = slots[start : start + size].astype(np.int64)[:, None]
            given = {io.RECORDS: self._pin(words.view(np.int32)), io.SLOTS: ids}
            with onnxruntime_errors(UPLOADING):
                from_numpy = ort.OrtValue.ortvalue_from_numpy
                self._graph.bind({name: from_numpy(array) for name, array in given.items()})
                self._graph.run()
            self.uploaded_nbytes += words.nbytes + ids.nbytes
        self.uploads += bool(len(slots))
        self.uploaded_rows += len(slots)

    def _pin(self, words: I32) -> I32:
        """The same in memory that a device reads by itself, if there is such memory."""
        if self._pinned is None:
            return words
        if len(words) > len(self._pinned.array):
            self._pinned = self._memory.pinned(words.shape, np.int32)
            return self._pin(words)
        held: I32 = self._pinned.array[: len(words)]
        held[:] = words
        return held

    def inputs(self) -> Mapping[str, ort.OrtValue]:
        """The slots as the inputs of graphs that are called after them."""
        return self._inputs

    def close(self) -> None:
        """Give the memory back, as soon as no other graph is bound to it."""
        self._inputs.clear()
        self._graph.unbind()
        self._pinned = None


def piece_records(rows: DeviceRows, count: int) -> int:
    """Records that go over at once, of at most as many as there are slots."""
    return max(1, min(count, PIECE_NBYTES // (rows.words * WORD)))
