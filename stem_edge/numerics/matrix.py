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
    def __init__(self, array: F32) -> None:
        self._array = array

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def rows(self, start: int, stop: int) -> F32:
        return self._array[start:stop]


class IndexedMatrix:
    """A Matrix whose row i is row index[i] of another matrix, for tokens that share rows."""

    def __init__(self, matrix: Matrix, index: I32) -> None:
        self.matrix, self.index = matrix, index

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.index), *self.matrix.shape[1:])

    def rows(self, start: int, stop: int) -> F32:
        ids = self.index[start:stop].tolist()
        return np.concatenate([self.matrix.rows(at, at + 1) for at in ids])


def whole(matrix: Matrix) -> F32:
    return matrix.rows(0, matrix.shape[0])
