"""Record layout: how the rows of one token are packed.

For each STEM layer in ascending order, a record contains the codes of the row and then its scales:

    [codes 0][scales 0][codes 1][scales 1] ...

A row is one or more arrays, its *parts*, one after the other: a vector of d_ff values, or the matrices of an expert.
Floats are stored as they are and have no scales. Integers (codecs.py) are split into groups of `group_size` values
that share one scale (numerics/quantize.py); no group spans two rows of a matrix. Everything is little-endian. The
layout of a store is written into the attributes of its zarr group.

A lookup says for each STEM layer which row a token uses. If a token uses its own row in every layer, its stored
record is read. Other lookups read a composed record (composing.py).
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Literal, TypeAlias

import msgspec
import numpy as np

from stem_edge.limits import MAX_LAYERS, MAX_RECORDS
from stem_edge.numerics.quantize import F32, MIN_BLOCK, U8
from stem_edge.tables.codecs import CODECS, F16, Codes, RowType

ScaleType = Literal["fp32", "fp16"]
Parts: TypeAlias = tuple[tuple[int, ...], ...]
Scales: TypeAlias = F16 | F32

MAX_RECORD_NBYTES = 1 << 28
MAX_PARTS, MAX_RANK = 2, 2  # an expert has two matrices


class RecordLayout(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True
):
    """Byte layout of the records of one table store. Raises ValueError for invalid fields.

    parts: shapes of the arrays that a row consists of: one vector, or an expert's matrices.
    """

    records: int  # number of tokens, unless tokens share records
    layers: tuple[int, ...]
    parts: Parts
    row_type: RowType
    group_size: int = 0  # values that share a scale; 0 for float rows
    scale_type: ScaleType = "fp32"

    def __post_init__(self) -> None:
        if len(self.parts) > MAX_PARTS or any(len(part) > MAX_RANK for part in self.parts):
            raise ValueError(
                f"rows of {len(self.parts)} parts; expected at most {MAX_PARTS}, each of at most "
                f"{MAX_RANK} dimensions"
            )
        sizes = [size for part in self.parts for size in part]
        if self.records > MAX_RECORDS:
            raise ValueError(f"{self.records} records; expected at most {MAX_RECORDS}")
        if self.records < 1 or not self.layers or not all(self.parts) or min(sizes, default=0) < 1:
            raise ValueError("a table store needs at least one record, one layer and one column")
        if list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ValueError(f"layers {self.layers} are not ascending from 0 without repeats")
        if self.layers[-1] >= MAX_LAYERS:
            raise ValueError(f"a table of layer {self.layers[-1]}; expected less than {MAX_LAYERS}")
        if self.quantized:
            self._check_groups()
        elif self.group_size or self.scale_type != "fp32":
            raise ValueError(
                f"{self.row_type} rows have no groups; found {self.group_size} with "
                f"{self.scale_type} scales"
            )
        if self.record_nbytes > MAX_RECORD_NBYTES:
            raise ValueError(f"a record of {self.record_nbytes} bytes is above {MAX_RECORD_NBYTES}")

    def _check_groups(self) -> None:
        size = self.group_size
        widths = [part[-1] for part in self.parts]
        fits = size >= MIN_BLOCK and not any(width % size for width in widths)
        if not fits or size & (size - 1):
            raise ValueError(
                f"group_size {size} must be a power of two, at least {MIN_BLOCK}, that divides "
                f"{' and '.join(map(str, widths))}, the last dimension of each part of a row"
            )

    @cached_property
    def bits(self) -> int:
        """Bits of one stored value, not counting the scales."""
        return CODECS[self.row_type].bits

    @cached_property
    def quantized(self) -> bool:
        """True if rows are integer codes with scales; False if they are floats."""
        return CODECS[self.row_type].scaled

    @cached_property
    def row_width(self) -> int:
        """Number of values in one row, which is a vector, or all matrices of an expert."""
        return sum(map(math.prod, self.parts))

    @cached_property
    def groups(self) -> int:
        """Number of scales in one row."""
        return self.row_width // self.group_size if self.quantized else 0

    @cached_property
    def codes_nbytes(self) -> int:
        return self.row_width * self.bits // 8

    @cached_property
    def row_nbytes(self) -> int:
        return self.codes_nbytes + self.groups * self.scales_dtype.itemsize

    @cached_property
    def record_nbytes(self) -> int:
        return self.row_nbytes * len(self.layers)

    @cached_property
    def codes_dtype(self) -> np.dtype[np.generic]:
        """dtype of the result of `row_codes()`: a float type, or uint8 for packed integers."""
        return np.dtype({32: "<f4", 16: "<f2"}.get(self.bits, "u1"))

    @cached_property
    def scales_dtype(self) -> np.dtype[np.generic]:
        return np.dtype({"fp32": "<f4", "fp16": "<f2"}[self.scale_type])

    def codes_shape(self, part: int = 0) -> tuple[int, ...]:
        """Return the shape of a row's codes in codes_dtype. part: which of an expert's matrices."""
        *outer, width = self.parts[part]
        return (*outer, width * self.bits // 8 // self.codes_dtype.itemsize)

    def scales_shape(self, part: int = 0) -> tuple[int, ...]:
        """Return the shape of a quantized row's scales. part: which of an expert's matrices."""
        *outer, width = self.parts[part]
        return (*outer, width // self.group_size)

    def codes_width(self, part: int = 0) -> int:
        """Number of columns in `row_codes()`. part: of which matrix, if rows are experts."""
        return math.prod(self.codes_shape(part))

    def part_groups(self, part: int = 0) -> int:
        """Number of columns in `row_scales()`. part: of which matrix, if rows are experts."""
        return math.prod(self.scales_shape(part)) if self.quantized else 0

    def row_codes(self, records: U8, index: int) -> Codes:
        """Return codes [n, columns] of the `index`-th STEM layer: a view of records [n, nbytes]."""
        start = index * self.row_nbytes
        return records[:, start : start + self.codes_nbytes].view(self.codes_dtype)

    def row_scales(self, records: U8, index: int) -> Scales:
        """Return scales [n, groups] of the `index`-th STEM layer: a view of records [n, nbytes]."""
        start = index * self.row_nbytes + self.codes_nbytes
        stop = (index + 1) * self.row_nbytes
        return records[:, start:stop].view(self.scales_dtype)

    def split(self, records: U8) -> tuple[Codes, Scales]:
        """Return views of all codes [n, layers, columns] and scales [n, layers, groups]."""
        rows = records.reshape(len(records), len(self.layers), self.row_nbytes)
        codes = rows[:, :, : self.codes_nbytes].view(self.codes_dtype)
        return codes, rows[:, :, self.codes_nbytes :].view(self.scales_dtype)

    def unpack(self, records: U8, index: int) -> F32:
        """Dequantize the rows of the `index`-th STEM layer to float32 [n, row_width]."""
        codes = self.row_codes(records, index)
        if not self.quantized:
            return codes.astype(np.float32)
        from stem_edge.numerics.quantizing import dequantize_blocks  # only if no engine does it

        scales = self.row_scales(records, index).astype(np.float32)
        return dequantize_blocks(codes.view(np.uint8), scales, self.bits)


# Token ids whose rows are averaged (a repeated id counts each time); usually one id.
Row: TypeAlias = tuple[int, ...]
RowLookup: TypeAlias = tuple[Row, ...]  # for each STEM layer, in ascending order
