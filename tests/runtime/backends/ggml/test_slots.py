"""Rows in ggml's blocks equal the rows of the records, when another implementation decodes them."""

from __future__ import annotations

import numpy as np
import pytest

from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.ggml.slots import BlockSlots
from stem_edge.tables.codecs import RowType
from stem_edge.tables.packing import make_layout, pack_records
from stem_edge.tables.rows import RecordLayout, ScaleType

gguf = pytest.importorskip("gguf")

KINDS: list[tuple[RowType, int, str, ScaleType]] = [
    ("int8", 32, "Q8_0", "fp32"),
    ("int8", 128, "Q8_0", "fp16"),
    ("int4", 32, "Q4_0", "fp32"),
    ("int4", 64, "Q4_0", "fp32"),
    ("int8", 16, "F32", "fp32"),
    ("int4", 16, "F32", "fp16"),
    ("fp16", 0, "F16", "fp32"),
    ("fp32", 0, "F32", "fp32"),
]
RECORDS, LAYERS = 6, (1, 4)


def layout_of(
    kind: RowType, group: int, scales: ScaleType, parts: tuple[tuple[int, ...], ...]
) -> RecordLayout:
    return make_layout(RECORDS, LAYERS, parts, kind, group, scales)


def stored_values(slots: BlockSlots, layer: int, part: int) -> F32:
    """Decode all slots of one part with the gguf package."""
    rows = slots.rows[layer][part]
    return np.asarray(
        gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(slots.type.number)), np.float32
    )


@pytest.mark.parametrize(("kind", "group", "stored", "scales"), KINDS)
@pytest.mark.parametrize("parts", [((256,),), ((8, 128), (64, 128))])
def test_slots_hold_the_rows_of_their_records(
    kind: RowType, group: int, stored: str, scales: ScaleType, parts: tuple[tuple[int, ...], ...]
) -> None:
    layout = layout_of(kind, group, scales, parts)
    rng = np.random.default_rng(0)
    shape = (RECORDS, layout.row_width)
    records = pack_records(layout, [rng.standard_normal(shape, np.float32) for _ in LAYERS])
    slots = BlockSlots(layout, 9)
    assert slots.type.name == stored
    places = np.array([8, 0, 3, 4, 1, 7])
    slots.write(places, records)
    for layer in range(len(LAYERS)):
        expected = layout.unpack(records, layer)
        found = np.concatenate([stored_values(slots, layer, n) for n in range(len(parts))], axis=1)
        # Scales are float16 in blocks: 11 bits of precision.
        np.testing.assert_allclose(found[places], expected, rtol=2**-11, atol=1e-7)
        assert not found[[2, 5, 6]].any()
