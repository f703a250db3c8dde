"""How one token's rows are packed into a record.

A record holds, for each STEM layer in ascending order, the row's codes and then its scales:

    [codes 0][scales 0][codes 1][scales 1] ...

float32 and float16 rows are stored as they are and have no scales. int8 and int4 rows are cut into
groups of `group_size` values that share one float32 scale (stem_edge.quantize). Everything is
little-endian. The layout of a store is written into the attributes of its zarr group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from stem_edge.quantize import (
    F32,
    MIN_BLOCK,
    U8,
    dequantize_blocks,
    fitting_block,
    quantize_blocks,
    zero_points,
)

RowType = Literal["fp32", "fp16", "int8", "int4"]
ROW_TYPES: tuple[RowType, ...] = get_args(RowType)
ROW_BITS: dict[RowType, int] = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4}
Codes: TypeAlias = npt.NDArray[np.uint8] | npt.NDArray[np.float16] | npt.NDArray[np.float32]

SCALE_NBYTES = 4
MAX_RECORD_NBYTES = 1 << 28
FP16_MAX = float(np.finfo(np.float16).max)


class RecordLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Byte layout of the records of one table store. Raises ValueError when it cannot exist."""

    vocab_size: int
    layers: tuple[int, ...]
    d_ff: int
    row_type: RowType
    group_size: int = 0  # values that share a scale; 0 for float rows

    def __post_init__(self) -> None:
        if self.vocab_size < 1 or self.d_ff < 1 or not self.layers:
            raise ValueError("a table store needs at least one token, one layer and one column")
        if list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ValueError(f"layers {self.layers} are not ascending from 0 without repeats")
        if self.quantized:
            fits = self.group_size >= MIN_BLOCK and self.d_ff % self.group_size == 0
            if not fits or self.group_size & (self.group_size - 1):
                raise ValueError(
                    f"group_size {self.group_size} must be a power of two, at least {MIN_BLOCK}, "
                    f"that divides d_ff {self.d_ff}"
                )
        elif self.group_size:
            raise ValueError(f"{self.row_type} rows have no groups; found {self.group_size}")
        if self.record_nbytes > MAX_RECORD_NBYTES:
            raise ValueError(f"a record of {self.record_nbytes} bytes is above {MAX_RECORD_NBYTES}")

    @property
    def bits(self) -> int:
        """Bits of one stored value, without its share of the scale."""
        return ROW_BITS[self.row_type]

    @property
    def quantized(self) -> bool:
        """Whether rows are codes with scales."""
        return self.bits <= 8

    @property
    def groups(self) -> int:
        """Scales in one row."""
        return self.d_ff // self.group_size if self.quantized else 0

    @property
    def codes_nbytes(self) -> int:
        """Bytes of one row's codes."""
        return self.d_ff * self.bits // 8

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row: codes and scales."""
        return self.codes_nbytes + self.groups * SCALE_NBYTES

    @property
    def record_nbytes(self) -> int:
        """Bytes of one record: all rows of one token."""
        return self.row_nbytes * len(self.layers)

    @property
    def codes_dtype(self) -> np.dtype[np.generic]:
        """dtype of `codes()`: uint8 for quantized rows, else the float type."""
        return np.dtype({32: "<f4", 16: "<f2"}.get(self.bits, "u1"))

    @property
    def codes_width(self) -> int:
        """Columns of `codes()`."""
        return self.codes_nbytes // self.codes_dtype.itemsize

    def codes(self, records: U8, index: int) -> Codes:
        """Codes [n, codes_width] of the `index`-th STEM layer: a view into records [n, nbytes]."""
        start = index * self.row_nbytes
        return records[:, start : start + self.codes_nbytes].view(self.codes_dtype)

    def scales(self, records: U8, index: int) -> F32:
        """Scales [n, groups] of the `index`-th STEM layer: a view into records [n, nbytes]."""
        start = index * self.row_nbytes + self.codes_nbytes
        return records[:, start : start + self.groups * SCALE_NBYTES].view("<f4")

    def zero_points(self, rows: int) -> U8:
        """Zero points [rows, bytes] that dequantizing `rows` quantized rows needs."""
        return zero_points(rows, self.groups, self.bits)

    def pack(self, rows: Sequence[F32]) -> U8:
        """Records [n, record_nbytes] from one float32 [n, d_ff] for each STEM layer.

        Raises ValueError for other shapes, and for values that fp16 rows cannot hold.
        """
        if len(rows) != len(self.layers) or {r.shape for r in rows} != {(len(rows[0]), self.d_ff)}:
            raise ValueError(
                f"rows of shapes {[r.shape for r in rows]}; expected {len(self.layers)} arrays "
                f"[n, {self.d_ff}]"
            )
        if self.row_type == "fp16" and any(r.size and np.abs(r).max() > FP16_MAX for r in rows):
            raise ValueError(f"a value is above {FP16_MAX:g}, the greatest that fp16 rows can hold")
        records = np.empty((len(rows[0]), self.record_nbytes), np.uint8)
        for index, values in enumerate(rows):
            if self.quantized:
                codes, scales = quantize_blocks(values, self.bits, self.group_size)
                self.codes(records, index)[:] = codes
                self.scales(records, index)[:] = scales
            else:
                self.codes(records, index)[:] = values
        return records

    def unpack(self, records: U8, index: int) -> F32:
        """Rows float32 [n, d_ff] of the `index`-th STEM layer."""
        codes = self.codes(records, index)
        if codes.dtype != np.uint8:
            return codes.astype(np.float32)
        return dequantize_blocks(codes.view(np.uint8), self.scales(records, index), self.bits)


def make_layout(
    vocab_size: int, layers: Sequence[int], d_ff: int, row_type: RowType, group_size: int
) -> RecordLayout:
    """A layout with the largest fitting group up to `group_size` (ignored for float rows)."""
    group = fitting_block(d_ff, group_size) if ROW_BITS[row_type] <= 8 else 0
    return RecordLayout(
        vocab_size=vocab_size,
        layers=tuple(layers),
        d_ff=d_ff,
        row_type=row_type,
        group_size=group,
    )
