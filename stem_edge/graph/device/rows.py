"""Layout of rows in the slots of a device, for the graph variants fp32 and fp16.

Each STEM layer has a slab [slots, words] of codes and, for quantized rows, a slab of scales in the
type of the activations. Slabs are written as int32 words, because every provider has kernels to
scatter those, and read as bytes or floats. A row must have an even number of scales: a provider may
pack 4-bit zero points in pairs across rows, and a word holds two float16. An odd number is made
even by storing each scale twice, for half a group.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from stem_edge.graph.names import row_codes, row_scales
from stem_edge.numerics.quantize import I32, MIN_BLOCK, U8, zero_points
from stem_edge.tables.rows import RecordLayout

WORD = 4  # bytes
Activations = Literal["fp32", "fp16"]


class Slab(NamedTuple):
    """Tensor with the codes or scales of one layer for all slots."""

    layer: int  # of the model
    scales: bool  # False: codes
    words: int  # int32 words of a slot
    width: int  # values of a slot, in dtype
    dtype: np.dtype[np.generic]

    @property
    def name(self) -> str:
        """Name of the graph input that it is bound to."""
        return (row_scales if self.scales else row_codes)(self.layer)


class DeviceRows:
    """Rows of a table store on a device. Raises ValueError for a layout that `fits` rejects."""

    def __init__(self, layout: RecordLayout, activations: Activations) -> None:
        if not fits(layout):
            raise ValueError(f"rows of {layout.parts} in groups of {layout.group_size}")
        self.layout, self.activations = layout, activations
        self.repeats = repeats(layout)
        self.scales_dtype = np.dtype({"fp32": "<f4", "fp16": "<f2"}[activations])
        self.slabs = [slab for layer in layout.layers for slab in self._slabs(layer)]

    def _slabs(self, layer: int) -> list[Slab]:
        layout = self.layout
        slabs = [_slab(layer, False, layout.codes_width(), layout.codes_dtype)]
        if layout.quantized:
            slabs.append(_slab(layer, True, self.groups, self.scales_dtype))
        return slabs

    @property
    def groups(self) -> int:
        """Number of scales of a row in a slot."""
        return self.layout.part_groups() * self.repeats

    @property
    def group_size(self) -> int:
        """Values that share a scale."""
        return self.layout.group_size // self.repeats

    @property
    def words(self) -> int:
        """int32 words of a slot over all slabs."""
        return sum(slab.words for slab in self.slabs)

    @property
    def slot_nbytes(self) -> int:
        """Bytes of a slot, including its zero points."""
        points = zero_points(1, self.groups, self.layout.bits).size if self.layout.quantized else 0
        return self.words * WORD + points

    def zero_points(self, slots: int) -> U8:
        """Return zero points uint8 [slots, bytes] of quantized rows, shared by all layers."""
        return zero_points(slots, self.groups, self.layout.bits)

    def pack(self, records: U8) -> I32:
        """Convert records [n, record_nbytes] to words [n, words], slab after slab."""
        packed = np.empty((len(records), self.words), "<i4")
        start = 0
        for slab in self.slabs:
            index = self.layout.layers.index(slab.layer)
            view = packed[:, start : start + slab.words].view(slab.dtype)
            if slab.scales:
                scales = self.layout.row_scales(records, index)
                # A scale above float16 becomes inf and needs no check: its logits are refused.
                with np.errstate(over="ignore"):
                    view[:] = np.repeat(scales, self.repeats, axis=1)
            else:
                view[:] = self.layout.row_codes(records, index)
            start += slab.words
        return packed


def fits(layout: RecordLayout) -> bool:
    """Return whether rows are vectors of whole words, in groups that can be halved if necessary."""
    if len(layout.parts) != 1 or len(layout.parts[0]) != 1 or layout.codes_nbytes % WORD:
        return False
    return not layout.quantized or layout.group_size // repeats(layout) >= MIN_BLOCK


def repeats(layout: RecordLayout) -> int:
    """Return how often a slot repeats each scale: 2 if a row has an odd number of them, else 1."""
    return 1 + layout.part_groups() % 2 if layout.quantized else 1


def _slab(layer: int, scales: bool, width: int, dtype: np.dtype[np.generic]) -> Slab:
    return Slab(layer, scales, width * dtype.itemsize // WORD, width, dtype)
