"""Storage of the rows of an n-gram table: many small rows per page. A page is read as a whole.

A page is the smallest unit that a drive reads, so a page takes as long to read as a single row. Rows are stored
as in the checkpoint, or with fewer bits. The scales of a row follow its codes.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import msgspec
import numpy as np

from stem_edge.numerics.ngram_hash import NgramHash
from stem_edge.numerics.quantize import F32, U8
from stem_edge.tables.rows import RecordLayout
from stem_edge.tables.store import CRC_NBYTES, TableFormat

PAGE_NBYTES = 4096
WORD_NBYTES = 2  # a page is stored as a record of 2-byte values, whatever it contains
Stored = Literal["fp32", "bf16", "fp16", "fp8", "int8", "int4"]
FLOAT_NBYTES: dict[Stored, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


def _fp8_values() -> F32:
    """Return the float32 values [256] of all float8 codes, in the format e4m3fn (OCP, 2023)."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    values = np.where(exponent > 0, (8 + fraction) * 2.0 ** (exponent - 10), fraction * 2.0**-9)
    values[exponent * 8 + fraction == 127] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


FP8 = _fp8_values()


class NgramTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """N-gram table: its hash function, and how rows are stored. Raises ValueError if invalid."""

    name: str  # of its folder
    layer: int | None  # layer that adds the rows, from 0; None: the input embedding
    hash: NgramHash
    width: int  # values of a row
    stored: Stored
    block: int = 0  # values that share a scale (fp16 for integers, e8m0 for fp8); 0: no scales
    scale: float = 1.0  # factor of all values

    def __post_init__(self) -> None:
        if not 0 < self.width <= PAGE_NBYTES or self.block < 0 or not np.isfinite(self.scale):
            raise ValueError(
                f"rows of {self.width} values, {self.block} a scale, times {self.scale}"
            )
        if self.block and (self.width % self.block or self.stored not in ("fp8", "int8", "int4")):
            raise ValueError(f"{self.stored} rows of {self.width} values, {self.block} a scale")
        if not self.name.replace(".", "").isalnum():
            raise ValueError(f"{self.name!r} cannot be a folder")
        _ = self.page_nbytes  # raises ValueError if codes lack scales

    @cached_property
    def codes(self) -> RecordLayout:
        """Layout of one row as a record. Only for tables with int8 or int4 rows."""
        return RecordLayout(
            records=1,
            layers=(0,),
            parts=((self.width,),),
            row_type="int4" if self.stored == "int4" else "int8",
            group_size=self.block,
            scale_type="fp16",
        )

    @cached_property
    def row_nbytes(self) -> int:
        if self.stored in FLOAT_NBYTES:
            scales = self.width // self.block if self.block else 0
            return self.width * FLOAT_NBYTES[self.stored] + scales
        return self.codes.record_nbytes

    @cached_property
    def rows_per_page(self) -> int:
        """Number of rows in a page: as many as fit with the checksum, at least one."""
        return max(1, (PAGE_NBYTES - CRC_NBYTES) // self.row_nbytes)

    @cached_property
    def page_nbytes(self) -> int:
        """Bytes of a page without its checksum: 4,092, or more if a single row is longer."""
        if self.row_nbytes <= PAGE_NBYTES - CRC_NBYTES:
            return PAGE_NBYTES - CRC_NBYTES
        return -(-self.rows_per_page * self.row_nbytes // WORD_NBYTES) * WORD_NBYTES

    @cached_property
    def pages(self) -> int:
        """Number of pages in the table. A page has `rows_per_page` rows; zeros pad the last page."""
        return -(-self.hash.rows // self.rows_per_page)

    @property
    def format(self) -> TableFormat:
        """Format of the table store: each page is a record, nominally of fp16 values."""
        words = ((self.page_nbytes // WORD_NBYTES,),)
        layout = RecordLayout(records=self.pages, layers=(0,), parts=words, row_type="fp16")
        return TableFormat(tokens=self.pages, stored=layout)

    def values(self, rows: U8) -> F32:
        """Decode stored rows [n, row_nbytes] to float32 [n, width]."""
        if self.stored not in FLOAT_NBYTES:
            layout = self.codes
            return layout.unpack(rows, 0) * np.float32(self.scale)
        split = self.width * FLOAT_NBYTES[self.stored]
        codes = np.ascontiguousarray(rows[:, :split])
        if self.stored == "fp8":
            values = FP8[codes]
        elif self.stored == "bf16":
            values = (codes.view("<u2").astype(np.uint32) << 16).view(np.float32)
        else:
            values = codes.view("<f4" if self.stored == "fp32" else "<f2").astype(np.float32)
        if self.block:  # scales are powers of two: e8m0 is an exponent (OCP microscaling, 2023)
            powers = np.ldexp(np.float32(1), rows[:, split:].astype(np.int32) - 127)
            values = (values.reshape(*powers.shape, -1) * powers[:, :, None]).reshape(len(rows), -1)
        return values if self.scale == 1 else values * np.float32(self.scale)
