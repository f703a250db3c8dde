"""Row cache slots as ggml tensors; quantized rows are converted to ggml's block formats.

int8 rows become Q8_0 and int4 rows Q4_0: the same codes, in blocks of 32 with a float16 scale each.
A group's scale is repeated for each of its blocks. Rounding it to float16 changes a value by at
most 2**-11 of its size, or, if the scale is below 6e-5, by 3e-8 times its code (at most 4e-6). Rows
in groups smaller than a block are kept as float32, because a block has only one scale.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt

from stem_edge.ggml import gguf_schema
from stem_edge.ggml import types as ggml_types
from stem_edge.numerics.quantize import U8
from stem_edge.numerics.quantizing import unpack_codes
from stem_edge.runtime.rows.slots import Slots
from stem_edge.system.memory import own_pages
from stem_edge.tables.codecs import FP16_MAX
from stem_edge.tables.rows import RecordLayout, Scales


class BlockSlots(Slots):
    """Row cache slots for ggml: uint8 [slots, bytes] for each layer with rows and each part of a row (codes, ...)."""

    def __init__(self, layout: RecordLayout, count: int) -> None:
        self.layout, self.count = layout, count
        self.type = gguf_schema.slot_type(layout)
        self._sizes = [self.type.row_nbytes(math.prod(part)) for part in layout.parts]
        self.rows: list[list[U8]] = [  # [layer][part]
            [own_pages((count, size), np.uint8) for size in self._sizes] for _ in layout.layers
        ]

    def write(self, slots: npt.NDArray[np.intp], records: U8) -> None:
        rows = self._encoded(records)
        for layer, parts in enumerate(self.rows):
            for part, end in zip(parts, itertools.accumulate(self._sizes), strict=True):
                part[slots] = rows[:, layer, end - part.shape[1] : end]

    def _encoded(self, records: U8) -> U8:
        """Return the rows of n records in the slots' format, uint8 [n, layers, bytes]."""
        layout = self.layout
        if self.type is ggml_types.F32 and layout.quantized:
            rows = [layout.unpack(records, layer) for layer in range(len(layout.layers))]
            return np.stack(rows, axis=1).view(np.uint8)
        codes, scales = layout.split(records)
        if not layout.quantized:
            return codes.view(np.uint8)
        return _blocks(codes.view(np.uint8), scales, layout.bits)


def _blocks(codes: U8, scales: Scales, bits: int) -> U8:
    """Return codes and scales (from RecordLayout.split) as ggml blocks of a scale and 32 codes: [n, layers, bytes]."""
    count, layers, groups = scales.shape
    rows = codes.reshape(count * layers, -1)
    values = unpack_codes(rows, bits)
    blocks = values.shape[1] // ggml_types.Q8_0.block
    values = values.reshape(len(rows), blocks, -1)
    if bits == 8:
        stored = values ^ np.uint8(0x80)  # ours are offset by 128, ggml's are signed
    else:  # ggml keeps the first half of a block in the low nibbles, the second in the high ones
        stored = values[:, :, :16] | (values[:, :, 16:] << np.uint8(4))
    repeated = np.repeat(
        scales.reshape(-1, groups).clip(-FP16_MAX, FP16_MAX).astype(np.float16),
        blocks // groups,
        axis=1,
    )
    heads = repeated.view(np.uint8).reshape(len(rows), blocks, 2)
    return np.concatenate([heads, stored], axis=2).reshape(count, layers, -1)
