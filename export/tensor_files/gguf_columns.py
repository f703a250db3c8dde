"""Columns of a matrix in a GGUF file: codes as they are stored where a row type holds them, else values."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from stem_edge.export.tensor_files.gguf_tensor import Coded, GgufTensor, decoded
from stem_edge.numerics.matrix import Matrix
from stem_edge.numerics.quantize import F32, U8
from stem_edge.tables.rows import ScaleType

PIECE_NBYTES = 16 << 20  # of rows that are read at a time, as many as a writer of tables asks for
SCALE_NBYTES = 2  # float16, the first in a block
BITS = {"Q4_0": 4, "Q8_0": 8}
OFFSET_BITS = {"Q4_1": 4}  # with what the code 0 stands for, of float16, after the scale
MIDDLE = np.float32(8)  # code that an offset stands for here


class LastRows:
    """Rows of a matrix; each thread keeps what it read last, since columns are read in turn."""

    def __init__(self, stored: Coded) -> None:
        self.stored, self._last = stored, threading.local()

    def codes(self, start: int, stop: int) -> U8:
        """Read rows start..stop as they are stored."""
        if getattr(self._last, "span", None) != (start, stop):
            self._last.codes = self.stored.codes(start, stop)
            self._last.span = start, stop
        found: U8 = self._last.codes
        return found


@dataclass(frozen=True)
class GgufColumns:
    """Columns first..first+width of a matrix: a Matrix."""

    matrix: LastRows
    first: int
    width: int

    @property
    def stored(self) -> Coded:
        """The matrix in the file."""
        return self.matrix.stored

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
        first = self.first // kind.block * kind.nbytes
        last = -(-(self.first + self.width) // kind.block) * kind.nbytes
        step = max(1, PIECE_NBYTES // kind.row_nbytes(self.stored.shape[1]))
        pieces = [
            self.matrix.codes(at, min(at + step, stop))[:, first:last]
            for at in range(start, max(stop, start + 1), step)
        ]
        return np.concatenate(pieces)


class BlockColumns(GgufColumns):
    """Columns that are whole blocks of codes with a scale each: a Scaled matrix."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return (BITS | OFFSET_BITS)[self.stored.type.name]

    @property
    def has_offsets(self) -> bool:
        """Whether a block has an offset."""
        return self.stored.type.name in OFFSET_BITS

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
        kind = self.stored.type
        blocks = self._cut(start, stop)[:, kind.nbytes - kind.block * self.bits // 8 :]
        if self.bits == 8:
            return (blocks ^ np.uint8(0x80)).reshape(-1, self.width)
        halves = np.concatenate([blocks & np.uint8(15), blocks >> np.uint8(4)], axis=1)
        return halves.reshape(-1, self.width)

    def scales(self, start: int, stop: int) -> F32:
        """Read scales [rows, blocks] of rows start..stop."""
        return self._floats(start, stop, 0)

    def offsets(self, start: int, stop: int) -> F32:
        """Read what the middle code stands for, [rows, blocks] of rows start..stop."""
        scales = self.scales(start, stop)
        if not self.has_offsets:
            return np.zeros_like(scales)
        return self._floats(start, stop, SCALE_NBYTES) + MIDDLE * scales

    def points(self, start: int, stop: int) -> None:
        """Return None: the middle stands for 0."""

    def _floats(self, start: int, stop: int, at: int) -> F32:
        stored = np.ascontiguousarray(self._cut(start, stop)[:, at : at + SCALE_NBYTES])
        return stored.view("<f2").astype(np.float32).reshape(-1, self.width // self.group_size)

    def _cut(self, start: int, stop: int) -> U8:
        return self.blocks(start, stop).reshape(-1, self.stored.type.nbytes)


def columns(stored: GgufTensor, width: int) -> list[GgufColumns]:
    """Divide a matrix into matrices of so many columns."""
    whole, kind = LastRows(stored), stored.type
    blocks = BlockColumns if kind.name in BITS and width % kind.block == 0 else GgufColumns
    return [blocks(whole, first, width) for first in range(0, stored.shape[1], width)]


def with_scales(matrix: Matrix) -> BlockColumns | None:
    """Return a matrix as codes with scales, and offsets; None if its type is of another form."""
    if isinstance(matrix, Coded) and matrix.type.name in BITS | OFFSET_BITS:
        return BlockColumns(LastRows(matrix), 0, matrix.shape[1])
    return None
