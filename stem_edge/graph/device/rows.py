"""Layout of rows in the slots of a device.

Each STEM layer has a slab [slots, words] of codes and, for quantized rows, a slab of float32 scales. Slabs
are written as int32 words, because every provider has kernels to scatter those, and read as bytes or floats.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stem_edge.graph import names as io
from stem_edge.graph.ir import Graph
from stem_edge.numerics.quantize import I32, U8
from stem_edge.tables.rows import RecordLayout

WORD = 4  # bytes


class Slab(NamedTuple):
    """Tensor with the codes or scales of one layer for all slots."""

    name: str  # of the graph input that it is bound to
    words: int  # int32 words of a slot
    width: int  # values of a slot, in dtype
    dtype: np.dtype[np.generic]


class DeviceRows:
    """Rows of a table store on a device, for a layout without `row_obstacle`."""

    def __init__(self, layout: RecordLayout) -> None:
        self.layout = layout
        self.slabs = [slab for layer in layout.layers for slab in self._slabs(layer)]
        self.words = sum(slab.words for slab in self.slabs)  # of a slot
        self.slot_nbytes = self.words * WORD

    def _slabs(self, layer: int) -> list[Slab]:
        layout, scales = self.layout, self.layout.part_groups()
        words, width = layout.codes_nbytes // WORD, layout.codes_width()
        slabs = [Slab(io.row_codes(layer), words, width, layout.codes_dtype)]
        if layout.quantized:
            slabs.append(Slab(io.row_scales(layer), scales, scales, np.dtype("<f4")))
        return slabs

    def pack(self, records: U8) -> I32:
        """Convert records [n, record_nbytes] to words [n, words], slab after slab."""
        packed, start = np.empty((len(records), self.words), "<i4"), 0
        for index in range(len(self.layout.layers)):
            parts = [self.layout.row_codes(records, index)]
            if self.layout.quantized:
                parts.append(self.layout.row_scales(records, index).astype("<f4"))
            for part in parts:
                stop = start + part.shape[1] * part.itemsize // WORD
                packed[:, start:stop].view(part.dtype)[:] = part
                start = stop
        return packed


def row_obstacle(layout: RecordLayout) -> str:
    """Return why rows cannot lie in slots of a device; empty if they can."""
    if len(layout.parts) != 1 or len(layout.parts[0]) != 1:
        return "experts run on the CPU only"
    if layout.codes_nbytes % WORD:
        return f"rows of {layout.codes_nbytes} bytes are not whole words of {WORD}"
    return ""


def rows_graph(rows: DeviceRows) -> Graph:
    """Build the graph that writes records [n, words] into slots [n, 1] of every slab."""
    graph = Graph()
    graph.input(io.RECORDS, np.int32, ["n", rows.words])
    graph.input(io.SLOTS, np.int64, ["n", 1])
    sizes = graph.sizes([slab.words for slab in rows.slabs])
    parts = [f"{io.RECORDS}.{slab.name}" for slab in rows.slabs]
    graph.node("Split", [io.RECORDS, sizes], parts, axis=1)
    for slab, part in zip(rows.slabs, parts, strict=True):
        shape: list[int | str] = ["slots", slab.words]
        name = graph.input(slab.name, np.int32, shape)
        new = graph.output(io.NEW + name, np.int32, shape)
        graph.add("ScatterND", [name, io.SLOTS, part], new)
    return graph
