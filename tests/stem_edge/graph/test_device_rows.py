"""Layout of rows in slots of a device: words that read back as codes and scales, in order."""

from __future__ import annotations

import numpy as np
import pytest

from stem_edge.graph.device.rows import DeviceRows, row_obstacle
from stem_edge.graph.names import row_codes, row_scales
from stem_edge.tables.codecs import RowType
from stem_edge.tables.packing import pack_records
from stem_edge.tables.rows import Parts, RecordLayout


def layout(row_type: RowType, parts: Parts, group_size: int = 0) -> RecordLayout:
    return RecordLayout(
        records=5, layers=(1, 4), parts=parts, row_type=row_type, group_size=group_size
    )


# Layouts with the int32 words of codes and of scales in a row.
FITTING = [
    (layout("int8", ((64,),), 32), 16, 2),
    (layout("int8", ((96,),), 32), 24, 3),
    (layout("int4", ((160,),), 32), 20, 5),
    (layout("fp16", ((6,),)), 3, 0),
    (layout("fp32", ((3,),)), 3, 0),
]


@pytest.mark.parametrize(("of", "codes", "scales"), FITTING)
def test_words_are_codes_and_scales(of: RecordLayout, codes: int, scales: int) -> None:
    random = np.random.default_rng(0)
    records = pack_records(
        of, [random.standard_normal((5, of.row_width), np.float32) for _ in of.layers]
    )
    rows = DeviceRows(of)
    names = [name for layer in of.layers for name in (row_codes(layer), row_scales(layer))]
    assert [slab.name for slab in rows.slabs] == (names if scales else names[::2])
    assert (rows.words, rows.slot_nbytes) == (2 * (codes + scales), 8 * (codes + scales))
    words, start = rows.pack(records), 0
    assert (words.shape, words.dtype) == ((5, rows.words), np.dtype("<i4"))
    for slab in rows.slabs:
        found = words[:, start : start + slab.words].view(slab.dtype)
        start += slab.words
        index, of_scales = of.layers.index(int(slab.name.split(".")[1])), "scales" in slab.name
        wanted = of.row_scales(records, index) if of_scales else of.row_codes(records, index)
        assert found.shape == (5, slab.width) and np.array_equal(found, wanted)
    assert start == rows.words
    assert rows.pack(records[:0]).shape == (0, rows.words)


@pytest.mark.parametrize(
    ("of", "said"),
    [
        *((of, "") for of, *_ in FITTING),
        (layout("fp16", ((3,),)), "rows of 6 bytes are not whole words of 4"),
        (layout("fp32", ((8,), (8,))), "experts run on the CPU only"),
        (layout("fp32", ((4, 8),)), "experts run on the CPU only"),
    ],
)
def test_rows_that_do_not_fit_say_why(of: RecordLayout, said: str) -> None:
    assert row_obstacle(of) == said
