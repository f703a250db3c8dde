"""Slots of the row cache in the memory of a device.

The missing records of a step are packed into words and uploaded as a batch for all layers: a graph
scatters them into the layers' slabs, and touches nothing else there.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from stem_edge.graph import names as io
from stem_edge.graph.device.rows import WORD, DeviceRows
from stem_edge.numerics.quantize import I32, U8
from stem_edge.runtime.backends.onnxruntime.device.places import pinned
from stem_edge.runtime.backends.onnxruntime.memory import DeviceMemory
from stem_edge.runtime.backends.onnxruntime.providers.session import (
    BoundSession,
    onnxruntime_errors,
)

# A batch is uploaded in pieces of this size, or of one record, to keep the device's use of
# temporary memory bounded.
PIECE_NBYTES = 32 << 20


class DeviceSlots:
    """Slots [count] in `memory`, filled by a session over the graph "rows".

    Raises OutOfMemoryError.
    """

    def __init__(
        self, rows: DeviceRows, count: int, memory: DeviceMemory, session: ort.InferenceSession
    ) -> None:
        self.layout, self.rows, self.count = rows.layout, rows, count
        self.uploads = 0  # batches
        self.uploaded_rows = 0  # records, each the rows of a token in all layers
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
        self._memory, self._pinned = memory, pinned(memory, (0, rows.words), np.int32)

    @property
    def slot_nbytes(self) -> int:
        return self.rows.slot_nbytes

    def stage(self, records: U8) -> I32:
        """Return records [n, record_nbytes] as words [n, words], in the order of slots.

        The slots need not be known yet; safe in any thread.
        """
        return self.rows.pack(records)

    def write(self, slots: npt.NDArray[np.intp], records: U8 | I32) -> None:
        """Upload records [n], or the words int32 that `stage` made of them, into slots [n].

        Raises OutOfMemoryError, DeviceLostError, BackendError; these slots are then undefined, the
        others intact.
        """
        size = piece_records(self.rows, self.count)
        for start in range(0, len(slots), size):
            piece = records[start : start + size]
            words = piece if piece.dtype == np.int32 else self.rows.pack(piece.view(np.uint8))
            ids = slots[start : start + size].astype(np.int64)[:, None]
            given = {io.RECORDS: self._pin(words.view(np.int32)), io.SLOTS: ids}
            with onnxruntime_errors("while uploading rows to the device"):
                from_numpy = ort.OrtValue.ortvalue_from_numpy
                self._graph.bind({name: from_numpy(array) for name, array in given.items()})
                self._graph.run()
            self.uploaded_nbytes += words.nbytes + ids.nbytes
        self.uploads += bool(len(slots))
        self.uploaded_rows += len(slots)

    def _pin(self, words: I32) -> I32:
        """Copy words to memory that the device reads by itself, if it has such."""
        if self._pinned is None:
            return words
        if len(words) > len(self._pinned.array):
            self._pinned = pinned(self._memory, words.shape, np.int32)
            return self._pin(words)
        held: I32 = self._pinned.array[: len(words)]
        held[:] = words
        return held

    def inputs(self) -> Mapping[str, ort.OrtValue]:
        """Return the slots by the names of the graphs' inputs for them."""
        return self._inputs

    def close(self) -> None:
        """Release the memory; it is freed once no other graph is bound to it."""
        self._inputs.clear()
        self._graph.unbind()
        self._pinned = None


def piece_records(rows: DeviceRows, count: int) -> int:
    """Return the records in a piece of an upload, at most as many as there are slots."""
    return max(1, min(count, PIECE_NBYTES // (rows.words * WORD)))
