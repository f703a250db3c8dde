"""Packs rows into records, and chooses the layout of records."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from stem_edge.numerics.quantize import F32, U8, fitting_block
from stem_edge.numerics.quantizing import cut, encode, extremes, pack_codes
from stem_edge.tables.codecs import CODECS, FP16_MAX, RowType
from stem_edge.tables.rows import Parts, RecordLayout, ScaleType

# Function of blocks [..., size] and the bits of a code; returns scales [...].
Scaling: TypeAlias = Callable[[F32, int], F32]


def range_scales(blocks: F32, bits: int) -> F32:
    """Return scales for `bits`-bit codes that store each block's greatest magnitude exactly."""
    return np.asarray(extremes(blocks) / -np.float32(1 << (bits - 1)), np.float32)


def pack_records(layout: RecordLayout, rows: Sequence[F32], scaling: Scaling = range_scales) -> U8:
    """Pack rows, float32 [n, row_width] for each STEM layer, into records [n, record_nbytes].

    scaling: function that chooses scales. least_error_scales (numerics.block_search) loses less, and takes
    several times as long. Raises ValueError for values above fp16's range.
    """
    records = np.empty((len(rows[0]), layout.record_nbytes), np.uint8)
    for index, values in enumerate(rows):
        if layout.quantized:
            codes, scales = _quantize(layout, values, scaling)
            layout.row_codes(records, index)[:] = codes
            layout.row_scales(records, index)[:] = scales
        else:
            if layout.bits == 16:
                _check_half(values, "value", "fp16 rows")
            layout.row_codes(records, index)[:] = values
    return records


def keep_records(layout: RecordLayout, rows: Sequence[tuple[U8, F32]]) -> U8:
    """Pack quantized rows, codes [n, row_width] and scales [n, 1] per layer, into records."""
    records = np.empty((len(rows[0][0]), layout.record_nbytes), np.uint8)
    for index, (codes, scales) in enumerate(rows):
        layout.row_codes(records, index)[:] = pack_codes(codes, layout.bits)
        layout.row_scales(records, index)[:] = scales
    return records


def _quantize(layout: RecordLayout, values: F32, scaling: Scaling) -> tuple[U8, F32]:
    """Quantize values [n, row_width]. Return codes, and the scales rounded to their type."""
    half, blocks = np.float32(1 << (layout.bits - 1)), cut(values, layout.group_size)
    scales = scaling(blocks, layout.bits)
    if layout.scale_type == "fp16":
        _check_half(scales, "scale", "fp16")
        # Rounded before encoding, so that the codes suit the scales that will be read.
        scales = scales.astype(np.float16).astype(np.float32)
    return encode(blocks, scales, half, layout.bits)


def _check_half(values: F32, what: str, type: str) -> None:
    if values.size and np.abs(values).max() > FP16_MAX:
        raise ValueError(f"a {what} is above {FP16_MAX:g}, the greatest that {type} can hold")


def make_layout(
    records: int,
    layers: Sequence[int],
    parts: Parts,
    row_type: RowType,
    group_size: int,
    scale_type: ScaleType = "fp32",
    mixed: int = 1,
) -> RecordLayout:
    """Return a record layout with the largest quantization group that fits, at most `group_size`.

    records: number of records. parts: shapes of the arrays of a row. mixed: number of vectors that
    a row consists of, if a router mixes several for each token; no group spans two of them.
    """
    width = math.gcd(*(part[-1] // mixed for part in parts))
    group = fitting_block(width, group_size) if CODECS[row_type].scaled else 0
    return RecordLayout(
        records=records,
        layers=tuple(layers),
        parts=parts,
        row_type=row_type,
        group_size=group,
        scale_type=scale_type,
    )
