"""Columns of a matrix in a GGUF file: codes as they are stored where a row type holds them, else values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stem_edge.export.tensor_files.gguf_tensor import GgufTensor, decoded
from stem_edge.numerics.quantize import F32, U8
from stem_edge.tables.rows import ScaleType

SCALE_NBYTES = 2  # float16, the first in a block of Q4_0 and Q8_0
BITS = {"Q4_0": 4, "Q8_0": 8}


@dataclass(frozen=True)
class GgufColumns:
    """Columns first..first+width of a matrix: a Matrix."""

    stored: GgufTensor
    first: int
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.stored.shape[0], self.width

    @property
    def nbytes(self) -> int:
        """Bytes of the columns."""
        return self.shape[0] * self.stored.type.row_nbytes(self.width)

    def rows(self, start: int, stop: int) -> F32:
        """Read rows start..stop as float32."""
        values = decoded(self.blocks(start, stop), self.stored.type)
        skipped = self.first % self.stored.type.block
        return values[:, skipped : skipped + self.width]

    def blocks(self, start: int, stop: int) -> U8:
        """Read the blocks in which rows start..stop have these columns."""
        kind = self.stored.type
        last = -(-(self.first + self.width) // kind.block) * kind.nbytes
        found = self.stored.codes(start, stop)[:, self.first // kind.block * kind.nbytes : last]
        return np.ascontiguousarray(found)


class BlockColumns(GgufColumns):
    """Columns that are whole blocks of codes with a scale each: a Scaled matrix."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return BITS[self.stored.type.name]

    @property
    def group_size(self) -> int:
        """Values that share a scale."""
        return self.stored.type.block

    @property
    def scale_type(self) -> ScaleType:
        """Type that holds the scales exactly."""
        return "fp16"

    def codes(self, start: int, stop: int) -> U8:
        """Read codes [rows, width] of rows start..stop."""
        blocks = self._cut(start, stop)[:, SCALE_NBYTES:]
        if self.bits == 8:
            return (blocks ^ np.uint8(0x80)).reshape(-1, self.width)
        halves = np.concatenate([blocks & np.uint8(15), blocks >> np.uint8(4)], axis=1)
        return halves.reshape(-1, self.width)

    def scales(self, start: int, stop: int) -> F32:
        """Read scales [rows, blocks] of rows start..stop."""
        stored = np.ascontiguousarray(self._cut(start, stop)[:, :SCALE_NBYTES]).view("<f2")
        return stored.astype(np.float32).reshape(-1, self.width // self.group_size)

    def points(self, start: int, stop: int) -> None:
        """Return None: the middle stands for 0."""

    def _cut(self, start: int, stop: int) -> U8:
        return self.blocks(start, stop).reshape(-1, self.stored.type.nbytes)


def columns(stored: GgufTensor, start: int, stop: int) -> GgufColumns:
    """Return the matrix of columns start..stop."""
    whole = not (start % stored.type.block or stop % stored.type.block)
    kind = BlockColumns if stored.type.name in BITS and whole else GgufColumns
    return kind(stored, start, stop - start)
