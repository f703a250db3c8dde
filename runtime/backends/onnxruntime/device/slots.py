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
from stem_edge.runtime.backends.onnxruntime.device.memory import DeviceMemory
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
        self.uploaded_rows = 0  # records, each the rows of a token in all layers
        self.uploaded_nbytes = 0
        self._graph = BoundSession(session)
        self._inputs: dict[str, ort.OrtValue] = {}
        for slab in rows.slabs:
            what = f"the row cache of {count:,} slots"
            array = memory.empty((count, slab.words), np.int32, what)
            self._graph.bind({slab.name: array.value(), io.NEW + slab.name: array.value()})
            self._inputs[slab.name] = array.value(slab.dtype, (count, slab.width))

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
        size = max(1, min(self.count, PIECE_NBYTES // (self.rows.words * WORD)))
        for start in range(0, len(slots), size):
            piece = records[start : start + size]
            words = piece if piece.dtype == np.int32 else self.rows.pack(piece.view(np.uint8))
            ids = slots[start : start + size].astype(np.int64)[:, None]
            with onnxruntime_errors("while uploading rows to the device"):
                self._graph.feed({io.RECORDS: words, io.SLOTS: ids})
                self._graph.run()
            self.uploaded_nbytes += words.nbytes + ids.nbytes
        self.uploaded_rows += len(slots)

    def inputs(self) -> Mapping[str, ort.OrtValue]:
        """Return the slots by the names of the graphs' inputs for them."""
        return self._inputs

    def close(self) -> None:
        """Release the memory; it is freed once no other graph is bound to it."""
        self._inputs.clear()
        self._graph.unbind()
