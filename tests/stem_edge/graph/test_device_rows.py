"""Layout of rows in slots of a device: words that read back as codes and scales, in order."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from stem_edge.graph.device.rows import Activations, DeviceRows, Slab, fits, repeats
from stem_edge.graph.names import row_codes, row_scales
from stem_edge.numerics.quantize import MIN_BLOCK
from stem_edge.tables.codecs import RowType
from stem_edge.tables.packing import pack_records
from stem_edge.tables.rows import Parts, RecordLayout

ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)


def layout(
    row_type: RowType, width: int, group_size: int = 0, layers: tuple[int, ...] = (1, 4)
) -> RecordLayout:
    return RecordLayout(
        records=5, layers=layers, parts=((width,),), row_type=row_type, group_size=group_size
    )


# Each with scales of one row in a slot, values that share one, and words of the codes.
QUANTIZED = [
    (layout("int8", 64, 32), 2, 32, 16),
    (layout("int8", 96, 32), 6, 16, 24),
    (layout("int4", 64, 16), 4, 16, 8),
    (layout("int4", 160, 32), 10, 16, 20),
    (layout("int4", 32, 32), 2, 16, 4),
]


def test_slabs_are_counted_in_words() -> None:
    f4, f2, u1 = (np.dtype(name) for name in ("<f4", "<f2", "u1"))
    quantized = layout("int8", 96, 32)
    assert DeviceRows(quantized, "fp32").slabs == [
        Slab(1, False, 24, 96, u1), Slab(1, True, 6, 6, f4),
        Slab(4, False, 24, 96, u1), Slab(4, True, 6, 6, f4),
    ]  # fmt: skip
    slabs = DeviceRows(quantized, "fp16").slabs
    assert slabs[1] == Slab(1, True, 3, 6, f2)
    assert [slab.name for slab in slabs] == [
        row_codes(1), row_scales(1), row_codes(4), row_scales(4)
    ]  # fmt: skip
    for activations in ACTIVATIONS:  # because rows of floats stay as stored
        halves = DeviceRows(layout("fp16", 6), activations)
        assert halves.slabs == [Slab(1, False, 3, 6, f2), Slab(4, False, 3, 6, f2)]
        whole = DeviceRows(layout("fp32", 3, layers=(2,)), activations)
        assert whole.slabs == [Slab(2, False, 3, 3, f4)]
        assert (halves.words, whole.words) == (6, 3)
        assert (halves.slot_nbytes, whole.slot_nbytes) == (24, 12)


@pytest.mark.parametrize(("of", "groups", "group_size", "words"), QUANTIZED)
def test_sizes_of_quantized_rows(
    of: RecordLayout, groups: int, group_size: int, words: int
) -> None:
    for activations, scale_nbytes in zip(ACTIVATIONS, (4, 2), strict=True):
        rows = DeviceRows(of, activations)
        assert (rows.groups, rows.group_size) == (groups, group_size)
        assert rows.words == 2 * (words + groups * scale_nbytes // 4)
        points = rows.zero_points(3)
        assert points.shape == (3, groups * of.bits // 8)
        assert np.all(points == {8: 0x80, 4: 0x88}[of.bits])
        assert rows.slot_nbytes == 4 * rows.words + points.shape[1]


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("of", [one for one, *_ in QUANTIZED])
def test_words_are_codes_and_scales(of: RecordLayout, activations: Activations) -> None:
    random = np.random.default_rng(0)
    values = [random.standard_normal((5, of.row_width), np.float32) for _ in of.layers]
    records, rows = pack_records(of, values), DeviceRows(of, activations)
    words = rows.pack(records)
    assert (words.shape, words.dtype) == ((5, rows.words), np.dtype("<i4"))
    start = 0
    for index in range(2):
        codes, scales = rows.slabs[2 * index : 2 * index + 2]
        bytes_ = words[:, start : start + codes.words].view(np.uint8)
        assert np.array_equal(bytes_, of.row_codes(records, index))
        start += codes.words
        kept = words[:, start : start + scales.words].view(scales.dtype).astype(np.float32)
        start += scales.words
        # Compare each value, also where its group is halved.
        spread = np.repeat(kept, rows.group_size, axis=1)
        expected = np.repeat(of.row_scales(records, index), of.group_size, axis=1)
        assert np.allclose(spread, expected, rtol=1e-3 if activations == "fp16" else 0, atol=0)
    assert start == rows.words


def test_words_are_floats() -> None:
    of = layout("fp16", 6)
    values = [np.arange(30, dtype=np.float32).reshape(5, 6) + 100 * n for n in range(2)]
    words = DeviceRows(of, "fp32").pack(pack_records(of, values))
    assert np.array_equal(words.view("<f2"), np.concatenate(values, axis=1))
    none = DeviceRows(of, "fp32").pack(pack_records(of, [value[:0] for value in values]))
    assert none.shape == (0, 6)


@pytest.mark.parametrize(
    ("row_type", "parts", "group_size", "times", "expected"),
    [
        ("fp32", ((1,),), 0, 1, True),
        ("fp16", ((6,),), 0, 1, True),
        ("fp16", ((3,),), 0, 1, False),  # no whole words
        ("fp32", ((8,), (8,)), 0, 1, False),
        ("fp32", ((4, 8),), 0, 1, False),
        ("int8", ((32,),), MIN_BLOCK, 1, True),
        ("int8", ((48,),), MIN_BLOCK, 2, False),  # half a group would be too small
        ("int8", ((96,),), 2 * MIN_BLOCK, 2, True),
        ("int4", ((16,),), MIN_BLOCK, 2, False),
    ],
)
def test_rows_that_fit(
    row_type: RowType, parts: Parts, group_size: int, times: int, expected: bool
) -> None:
    of = RecordLayout(records=5, layers=(0,), parts=parts, row_type=row_type, group_size=group_size)
    assert (repeats(of), fits(of)) == (times, expected)
    if expected:
        assert DeviceRows(of, "fp32").repeats == times
    else:
        with pytest.raises(ValueError, match=r"rows of \(\(.* in groups of \d+"):
            DeviceRows(of, "fp32")
