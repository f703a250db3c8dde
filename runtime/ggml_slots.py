"""Slots of the row cache as tensors of ggml, quantized rows in ggml's own blocks.

int8 rows become Q8_0 and int4 rows Q4_0: the same codes, in blocks of 32 with a float16 scale each.
A group's scale is repeated for its blocks; rounding it to float16 costs 2**-11 of a value at most.
Rows in smaller groups, which no block can hold, are kept as float32.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt

from stem_edge import ggml_types, gguf_schema
from stem_edge.quantize import U8, unpack_codes
from stem_edge.rows import RecordLayout
from stem_edge.runtime.machine import page_aligned


class BlockSlots:
    """An array [count, bytes] for each part of each STEM layer's row."""

    def __init__(self, layout: RecordLayout, count: int) -> None:
        self.layout, self.count = layout, count
        self.type = gguf_schema.slot_type(layout)
        self._sizes = [self.type.row_nbytes(math.prod(part)) for part in layout.parts]
        self.rows: list[list[U8]] = [  # [layer][part]
            [page_aligned((count, size)) for size in self._sizes] for _ in layout.layers
        ]

    @property
    def slot_nbytes(self) -> int:
        """See Slots.slot_nbytes."""
        return gguf_schema.slot_nbytes(self.layout)

    def write(self, slots: npt.NDArray[np.intp], records: U8) -> None:
        """See Slots.write."""
        for index, parts in enumerate(self.rows):
            rows = self._encoded(records, index)
            for part, end in zip(parts, itertools.accumulate(self._sizes), strict=True):
                part[slots] = rows[:, end - part.shape[1] : end]

    def _encoded(self, records: U8, index: int) -> U8:
        """Rows [n, bytes] of the `index`-th STEM layer in the form of the slots."""
        layout = self.layout
        if self.type is ggml_types.F32:
            return layout.unpack(records, index).view(np.uint8)
        codes = layout.row_codes(records, index)
        if self.type is ggml_types.F16:
            return np.ascontiguousarray(codes).view(np.uint8)
        return _blocks(codes.view(np.uint8), layout.row_scales(records, index), layout.bits)


def _blocks(codes: U8, scales: npt.NDArray[np.floating], bits: int) -> U8:
    """Blocks of 32 codes after their scale, [n, bytes], from codes [n, bytes] and scales [n, G]."""
    values = unpack_codes(codes, bits) if bits == 4 else codes
    rows, width = values.shape
    count = width // ggml_types.Q8_0.block
    repeated = np.repeat(scales.astype(np.float16), count // scales.shape[1], axis=1)
    values = values.reshape(rows, count, -1)
    if bits == 8:
        stored = values ^ np.uint8(0x80)  # from codes around 128 to signed ones
    else:  # the first half of a block in the low nibbles, the second in the high ones
        stored = values[:, :, :16] | (values[:, :, 16:] << np.uint8(4))
    heads = repeated.view(np.uint8).reshape(rows, count, 2)
    return np.concatenate([heads, stored], axis=2).reshape(rows, -1)
