"""Memory of the row cache, in the layout that an engine's graph reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stem_edge.graph import names as io
from stem_edge.numerics.quantize import F32, U8, zero_points
from stem_edge.tables.codecs import Codes
from stem_edge.tables.rows import RecordLayout


class Slots(Protocol):
    """Memory for a fixed number of table records, in numbered slots."""

    layout: RecordLayout
    count: int

    def write(self, slots: npt.NDArray[np.intp], records: U8) -> None:
        """Write records [n, record_nbytes] into slots [n]."""


class ArraySlots(Slots):
    """Row cache slots for onnxruntime: arrays of quantized values, and of their scales."""

    def __init__(self, layout: RecordLayout, count: int) -> None:
        self.layout, self.count = layout, count
        layers, parts = range(len(layout.layers)), range(len(layout.parts))
        # An array [slots, columns] per [layer][part], because each is an input of the graph.
        self.codes: list[list[Codes]] = [
            [np.zeros((count, layout.codes_width(part)), layout.codes_dtype) for part in parts]
            for _ in layers
        ]
        self.scales: list[list[F32]] = [
            [np.zeros((count, layout.part_groups(part)), np.float32) for part in parts]
            for _ in (layers if layout.quantized else ())
        ]

    def inputs(self) -> dict[str, npt.NDArray[Any]]:
        layout = self.layout
        arrays: dict[str, npt.NDArray[Any]] = {}
        for index, layer in enumerate(layout.layers):
            for part in range(len(layout.parts)):
                codes, shape = self.codes[index][part], layout.codes_shape(part)
                arrays[io.row_codes(layer, part)] = codes.reshape(self.count, *shape)
                if layout.quantized:
                    scales, shape = self.scales[index][part], layout.scales_shape(part)
                    arrays[io.row_scales(layer, part)] = scales.reshape(self.count, *shape)
        if layout.quantized:
            arrays[io.ROW_ZERO_POINTS] = zero_points(self.count, layout.part_groups(), layout.bits)
        return arrays

    def write(self, slots: npt.NDArray[np.intp], records: U8) -> None:
        for index, codes in enumerate(self.codes):
            _put(codes, slots, self.layout.row_codes(records, index))
            if self.scales:
                _put(self.scales[index], slots, self.layout.row_scales(records, index))


def _put(parts: Sequence[Codes], slots: npt.NDArray[np.intp], rows: Codes) -> None:
    """Write rows [n, columns] to slots [n]. The arrays in `parts` split the columns, in order."""
    start = 0
    for part in parts:
        stop = start + part.shape[1]
        part[slots] = rows[:, start:stop]
        start = stop
