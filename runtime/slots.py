"""Where the rows of a row cache lie: arrays in the form that an engine's graph reads."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from stem_edge.footprint import array_slot_nbytes
from stem_edge.quantize import F32, U8
from stem_edge.rows import Codes, RecordLayout


class Slots(Protocol):
    """Memory for the rows of `count` records, in numbered slots."""

    layout: RecordLayout
    count: int

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot."""

    def write(self, slots: npt.NDArray[np.intp], records: U8) -> None:
        """Put records [n, record_nbytes] into these slots [n]."""


class ArraySlots:
    """Codes and scales as records have them, for onnxruntime."""

    def __init__(self, layout: RecordLayout, count: int) -> None:
        self.layout, self.count = layout, count
        layers, parts = range(len(layout.layers)), range(len(layout.parts))
        # [layer][part], an array each, because each is an input of the graph: [slots, columns].
        self.codes: list[list[Codes]] = [
            [np.zeros((count, layout.codes_width(part)), layout.codes_dtype) for part in parts]
            for _ in layers
        ]
        self.scales: list[list[F32]] = [
            [np.zeros((count, layout.part_groups(part)), np.float32) for part in parts]
            for _ in (layers if layout.quantized else ())
        ]

    @property
    def slot_nbytes(self) -> int:
        """See Slots.slot_nbytes; with the zero points that dequantizing needs."""
        return array_slot_nbytes(self.layout)

    def write(self, slots: npt.NDArray[np.intp], records: U8) -> None:
        """See Slots.write."""
        for index, parts in enumerate(self.codes):
            for part, codes in enumerate(parts):
                codes[slots] = self.layout.codes(records, index, part)
                if self.scales:
                    self.scales[index][part][slots] = self.layout.scales(records, index, part)
