"""Tensors in GGUF files: their codes as they are, or the float32 values that these stand for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from stem_edge.export.tensor_files.stored_tensor import SourceFile
from stem_edge.ggml.types import TensorType
from stem_edge.numerics.matrix import Matrix
from stem_edge.numerics.quantize import F32, U8

NUMBERS = {"F32": "<f4", "F16": "<f2", "I32": "<i4"}

TILE_NBYTES = 1 << 18  # of codes that are decoded at once, so that they stay in the CPU's cache


@runtime_checkable
class Coded(Matrix, Protocol):
    """Matrix with rows stored in one of ggml's types."""

    @property
    def type(self) -> TensorType:
        """Type of its values."""

    def codes(self, start: int, stop: int) -> U8:
        """Rows start..stop as they are stored, [rows, bytes of a row]."""


@dataclass(frozen=True, repr=False)
class GgufTensor:
    """Tensor in a file: a Coded matrix, or a vector."""

    file: SourceFile
    name: str
    type: TensorType
    shape: tuple[int, ...]
    at: int  # byte of the first value

    def __repr__(self) -> str:
        return f"a tensor {list(self.shape)} of {self.type.name}"

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.file.path

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape[:-1]) * self.type.row_nbytes(self.shape[-1])

    def flat(self) -> GgufTensor:
        """Return matrices that are stacked as one, with all their rows."""
        return replace(self, shape=(math.prod(self.shape[:-1]), self.shape[-1]))

    def part(self, start: int, stop: int) -> GgufTensor:
        """Return the matrix of rows start..stop."""
        at = self.at + start * self.type.row_nbytes(self.shape[1])
        return replace(self, shape=(stop - start, self.shape[1]), at=at)

    def codes(self, start: int, stop: int) -> U8:
        """Read rows start..stop as they are stored; of a vector, values as rows."""
        width = self.shape[1] if len(self.shape) > 1 else 1
        rows, row = max(0, min(stop, self.shape[0]) - start), self.type.row_nbytes(width)
        data = self.file.values(self.at + start * row, rows * row, "u1")
        return data.reshape(rows, row)

    def rows(self, start: int, stop: int) -> F32:
        """Read rows start..stop as float32."""
        values = decoded(self.codes(start, stop), self.type)
        return values.reshape(-1, *self.shape[1:])


def decoded(codes: U8, type: TensorType) -> F32:
    """Return the values of stored rows as float32."""
    if type.name in NUMBERS:
        return np.asarray(codes.view(NUMBERS[type.name]), np.float32)
    if type.name == "BF16":  # the upper half of a float32
        return (codes.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    import gguf  # which takes longer than all of this package, and only such types need it

    number = gguf.GGMLQuantizationType(type.number)
    step = max(1, TILE_NBYTES // codes.shape[1])
    tiles = [codes[start : start + step] for start in range(0, len(codes), step)] or [codes]
    with np.errstate(all="ignore"):  # check_finite refuses infinite values later
        # A tile as one row, because gguf goes through rows in a loop of Python.
        values = [
            gguf.quants.dequantize(tile.reshape(1, -1), number).reshape(len(tile), -1)
            for tile in tiles
        ]
    return np.ascontiguousarray(np.concatenate(values), np.float32)
