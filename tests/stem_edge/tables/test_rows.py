"""Layouts of records: sizes, packing and unpacking of rows."""

import struct
from typing import Any

import numpy as np
import pytest

from stem_edge.numerics.quantize import F32
from stem_edge.tables.codecs import CODECS, RowType
from stem_edge.tables.packing import pack_records
from stem_edge.tables.rows import MAX_RECORD_NBYTES, RecordLayout

STAIRS = list(range(-8, 8))
DOUBLE = [2 * value for value in STAIRS]


def layout_of(row_type: RowType, **changes: Any) -> RecordLayout:
    group = 16 if row_type.startswith("int") else 0
    fields = {"records": 5, "layers": (1, 3), "parts": ((16,),), "group_size": group}
    return RecordLayout(**{"row_type": row_type, **fields, **changes})


def random_rows(layout: RecordLayout, count: int = 5) -> list[F32]:
    rng = np.random.default_rng(0)
    shape = (count, layout.row_width)
    return [rng.standard_normal(shape).astype(np.float32) for _ in layout.layers]


@pytest.mark.parametrize(
    ("row_type", "expected"),
    [
        ("fp32", struct.pack("<32f", *STAIRS, *DOUBLE)),
        ("fp16", struct.pack("<32e", *STAIRS, *DOUBLE)),
        (
            "int8",
            bytes(range(0, 256, 16))
            + struct.pack("<f", 1 / 16)
            + bytes(range(0, 256, 16))
            + struct.pack("<f", 1 / 8),
        ),
        ("int4", bytes.fromhex("1032547698badcfe 0000803f 1032547698badcfe 00000040")),
    ],
)
def test_exact_bytes_of_a_record(row_type: RowType, expected: bytes) -> None:
    layout = layout_of(row_type)
    records = pack_records(layout, [np.array([STAIRS], np.float32), np.array([DOUBLE], np.float32)])
    assert records.tobytes() == expected
    assert records.shape == (1, layout.record_nbytes)


@pytest.mark.parametrize(
    ("row_type", "changes", "said"),
    [
        ("fp32", {"records": 0}, "at least one record"),
        ("fp32", {"records": -5}, "at least one record"), ("fp32", {"layers": ()}, "one layer"),
        ("fp32", {"layers": (3, 1)}, "layers"), ("fp32", {"layers": (1, 1)}, "layers"),
        ("fp32", {"layers": (-1, 1)}, "layers"), ("fp32", {"parts": ((0,),)}, "one column"),
        *[("fp32", {"parts": parts}, "one column") for parts in ((), ((),), ((16,), (4, -4)))],
        ("int8", {"parts": ((16,), (16, 8))}, "divides 16 and 8"),
        ("fp16", {"scale_type": "fp16"}, "fp16 rows have no groups; found 0 with fp16 scales"),
        ("fp32", {"group_size": 16}, "fp32 rows have no groups; found 16"),
        ("fp16", {"group_size": -1}, "fp16 rows have no groups; found -1"),
        ("int8", {"group_size": 0}, "group_size 0 must be a power of two"),
        ("int8", {"group_size": -16}, "group_size -16 must be a power of two"),
        ("int8", {"group_size": 8}, "at least 16"), ("int4", {"group_size": 32}, "divides 16"),
        ("int4", {"group_size": 48, "parts": ((96,),)}, "group_size 48 must be a power of two"),
        ("int4", {"parts": ((40,),)}, "divides 40"),
        ("fp32", {"parts": ((MAX_RECORD_NBYTES // 4 // 2 + 1,),)}, f"above {MAX_RECORD_NBYTES}"),
    ],
)  # fmt: skip
def test_layouts_that_cannot_exist(
    row_type: RowType, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        layout_of(row_type, **changes)


MATRICES = ((3, 16), (2, 32))  # two parts of 48 and 64 values


@pytest.mark.parametrize("row_type", CODECS)
def test_parts_follow_each_other_and_scales_follow_all_parts(row_type: RowType) -> None:
    layout = layout_of(row_type, parts=MATRICES)
    rows = random_rows(layout, count=2)
    records = pack_records(layout, rows)
    assert layout.row_width == 112
    for index, row in enumerate(rows):
        codes = np.split(layout.row_codes(records, index), [layout.codes_width(0)], axis=1)
        assert [c.shape[1] for c in codes] == [layout.codes_width(part) for part in range(2)]
        if not layout.quantized:
            assert np.array_equal(np.hstack(codes), row.astype(codes[0].dtype))
            continue
        scales = np.split(layout.row_scales(records, index), [layout.part_groups(0)], axis=1)
        assert [s.shape[1] for s in scales] == [layout.part_groups(part) for part in range(2)]
        for part, columns in enumerate((slice(0, 48), slice(48, 112))):
            alone = layout_of(row_type, parts=(MATRICES[part],), layers=(1,))
            expected = pack_records(alone, [np.ascontiguousarray(row[:, columns])])
            assert np.array_equal(codes[part], alone.row_codes(expected, 0))
            assert np.array_equal(scales[part], alone.row_scales(expected, 0))


def test_exact_bytes_with_fp16_scales() -> None:
    layout = layout_of("int4", layers=(1,), scale_type="fp16")
    # 1.5 / 8 is a float16, 1.7 / 8 is not: codes must belong to the stored scale.
    rows = np.array([STAIRS, [1.7, *[0.8] * 15]], np.float32)
    scale = np.float16(np.float32(1.7) / -8)
    codes = [0, *[round(float(8 + np.float32(0.8) / np.float32(scale)))] * 15]
    packed = bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True))
    expected = bytes.fromhex("1032547698badcfe 003c") + packed + scale.tobytes()
    assert pack_records(layout, [rows]).tobytes() == expected
    assert layout.row_nbytes == 10


def test_what_fp16_cannot_hold_is_refused() -> None:
    for layout in (
        layout_of("int8", scale_type="fp16", layers=(1,)),
        layout_of("fp16", layers=(1,)),
    ):
        with pytest.raises(ValueError, match="greatest that fp16"):
            pack_records(layout, [np.full((1, 16), 1e7, np.float32)])
