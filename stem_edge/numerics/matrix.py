"""Matrices that are read piece by piece: from a checkpoint, an opened bundle, or memory."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from stem_edge.numerics.quantize import F32, I32


class Matrix(Protocol):
    """A matrix [rows, columns], or a vector [rows], read piece by piece."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape: (rows, columns) of a matrix, (rows,) of a vector."""

    def rows(self, start: int, stop: int, /) -> F32:
        """Return the rows from start to stop (exclusive) as float32."""


class ArrayMatrix:
    """A Matrix over an array in memory."""

    def __init__(self, array: F32) -> None:
        self._array = array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self._array.shape

    def rows(self, start: int, stop: int) -> F32:
        """Return the rows from start to stop (exclusive), without a copy."""
        return self._array[start:stop]


class IndexedMatrix:
    """A Matrix whose row i is row index[i] of another matrix, for tokens that share rows."""

    def __init__(self, matrix: Matrix, index: I32) -> None:
        self.matrix, self.index = matrix, index

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape: (number of tokens, columns)."""
        return (len(self.index), *self.matrix.shape[1:])

    def rows(self, start: int, stop: int) -> F32:
        """Return the rows of the tokens from start to stop (exclusive)."""
        ids = self.index[start:stop].tolist()
        return np.concatenate([self.matrix.rows(at, at + 1) for at in ids])


def whole(matrix: Matrix) -> F32:
    """Read a whole matrix as one float32 array."""
    return matrix.rows(0, matrix.shape[0])
