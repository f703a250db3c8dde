"""Matrices of a checkpoint in pieces of rows, on several threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from stem_edge.export.checkpoint import check_finite
from stem_edge.export.parallel import in_order
from stem_edge.export.report import ErrorMeter
from stem_edge.quantize import F32
from stem_edge.reference import Matrix

PIECE_VALUES = 1 << 22  # values worked on at a time, in each thread: 16 MiB of float32

R = TypeVar("R")


class Weights:
    """Reads matrices in pieces of rows and puts the results in order."""

    def __init__(self, threads: int, meter: ErrorMeter, progress: Callable[[int], object]) -> None:
        self.meter, self._progress, self._threads = meter, progress, threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="stem-edge-export")

    def stream(
        self, name: str, matrices: Sequence[Matrix], work: Callable[[F32], R]
    ) -> Iterator[R]:
        """work(rows [n, K]) for all rows of the matrices, in order."""

        def one(span: tuple[Matrix, int, int]) -> R:
            matrix, start, stop = span
            values = check_finite(name, start, matrix.rows(start, stop))
            self._progress(values.nbytes)
            return work(values)

        return in_order(self._pool, one, _spans(matrices), self._threads + 1)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)


class RowRange:
    """Rows start to stop of a matrix."""

    def __init__(self, matrix: Matrix, start: int, stop: int) -> None:
        self._matrix, self._start = matrix, start
        self.shape: tuple[int, ...] = (stop - start, matrix.shape[1])

    def rows(self, start: int, stop: int) -> F32:
        """Rows of the range."""
        return self._matrix.rows(self._start + start, self._start + stop)


def _spans(matrices: Sequence[Matrix]) -> Iterator[tuple[Matrix, int, int]]:
    for matrix in matrices:
        step = max(1, PIECE_VALUES // matrix.shape[1])
        for start in range(0, matrix.shape[0], step):
            yield matrix, start, min(start + step, matrix.shape[0])
