"""How rows lie in the slots of a device: what the graphs of the variants fp32 and fp16 are fed.

Each STEM layer has a slab [slots, words] of codes and, for quantized rows, one of scales in the type
of the graph's activations. Slabs are counted in words of int32, which kernels of every provider can
put into place, and read as bytes or floats. The scales of a row are even in number: a provider may
pack zero points of 4 bits by pairs over all rows, and words of float16 are pairs. Where they are odd,
each stands twice, for half a group.
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
    """One tensor of slots."""

    layer: int  # of the model
    scales: bool  # or codes
    words: int  # int32 in a slot
    width: int  # values in a slot, of the type below
    dtype: np.dtype[np.generic]

    @property
    def name(self) -> str:
        """Input of the graphs that it is."""
        return (row_scales if self.scales else row_codes)(self.layer)


class DeviceRows:
    """Rows of one table store on a device. Raises ValueError where `fits` says no."""

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
        """Scales of one row in a slot."""
        return self.layout.part_groups() * self.repeats

    @property
    def group_size(self) -> int:
        """Values that share one."""
        return self.layout.group_size // self.repeats

    @property
    def words(self) -> int:
        """int32 of one slot, all slabs."""
        return sum(slab.words for slab in self.slabs)

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot, with its zero points."""
        points = zero_points(1, self.groups, self.layout.bits).size if self.layout.quantized else 0
        return self.words * WORD + points

    def zero_points(self, slots: int) -> U8:
        """Zero points uint8 [slots, bytes] of quantized rows, the same for all layers."""
        return zero_points(slots, self.groups, self.layout.bits)

    def pack(self, records: U8) -> I32:
        """Records [n, record_nbytes] as words [n, words]: slab beside slab, in their order."""
        packed = np.empty((len(records), self.words), "<i4")
        start = 0
        for slab in self.slabs:
            index = self.layout.layers.index(slab.layer)
            view = packed[:, start : start + slab.words].view(slab.dtype)
            if slab.scales:
                scales = self.layout.row_scales(records, index)
                with np.errstate(over="ignore"):  # what comes of inf is refused with the logits
                    view[:] = np.repeat(scales, self.repeats, axis=1)
            else:
                view[:] = self.layout.row_codes(records, index)
            start += slab.words
        return packed


def fits(layout: RecordLayout) -> bool:
    """Whether rows can lie like this: vectors, of whole words, in groups that can be halved."""
    if len(layout.parts) != 1 or len(layout.parts[0]) != 1 or layout.codes_nbytes % WORD:
        return False
    return not layout.quantized or layout.group_size // repeats(layout) >= MIN_BLOCK


def repeats(layout: RecordLayout) -> int:
    """How often each scale of quantized rows stands in a slot."""
    return 1 + layout.part_groups() % 2 if layout.quantized else 1


def _slab(layer: int, scales: bool, width: int, dtype: np.dtype[np.generic]) -> Slab:
    return Slab(layer, scales, width * dtype.itemsize // WORD, width, dtype)
