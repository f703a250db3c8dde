"""Processes matrices in pieces of rows on several threads, and yields the results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeAlias, TypeVar

from threadpoolctl import ThreadpoolController

from stem_edge.export.checkpoints.checkpoint import check_finite
from stem_edge.numerics.matrix import Matrix
from stem_edge.numerics.quantize import F32

BLAS = ThreadpoolController()  # made once, because it searches all loaded libraries
PIECE_VALUES = 1 << 21  # float32 values of a piece, 8 MiB; each thread holds one piece
OF_LAYERS = ("layers.", "blk.")  # prefixes of tensors in layers, here and in ggml

RowSpan: TypeAlias = tuple[Matrix, int, int]  # start..stop of a matrix
T = TypeVar("T")
R = TypeVar("R")


def in_order(threads: int, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield work(item) for all items in order, computed on several threads.

    At most threads + 1 items are pending, to save memory. Each BLAS call uses only one thread.
    """
    pending: deque[Future[R]] = deque()
    with (
        BLAS.limit(limits=1, user_api="blas"),
        ThreadPoolExecutor(threads, thread_name_prefix="stem-edge-export") as pool,
    ):
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) > threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class MatrixReader:
    """Reads matrices in pieces of rows, and processes the pieces on several threads.

    progress: called with the bytes read, counted as float32.
    """

    def __init__(self, threads: int, progress: Callable[[int], object]) -> None:
        self._threads, self._progress = threads, progress

    def in_order(self, work: Callable[[RowSpan], R], items: Iterable[RowSpan]) -> Iterator[R]:
        return in_order(self._threads, work, items)

    def spans(self, parts: Sequence[RowSpan]) -> Iterator[RowSpan]:
        """Divide spans of rows (`parts`) into small pieces, so that all threads have work."""
        for matrix, first, end in parts:
            step = max(1, min(PIECE_VALUES // matrix.shape[1], -(-(end - first) // self._threads)))
            for start in range(first, end, step):
                yield matrix, start, min(start + step, end)

    def count(self, name: str, nbytes: int) -> None:
        """Advance the progress bar by `nbytes`, unless tensor `name` is the embedding or the head."""
        if name.startswith(OF_LAYERS):
            self._progress(nbytes)

    def read(self, name: str, span: RowSpan) -> F32:
        """Read rows [n, K] of a span. Raises CheckpointError for values that are not finite."""
        matrix, start, stop = span
        values = check_finite(name, start, matrix.rows(start, stop))
        self.count(name, values.nbytes)
        return values

    def stream(self, name: str, parts: Sequence[RowSpan], work: Callable[[F32], R]) -> Iterator[R]:
        """Yield work(rows [n, K]) for each piece of `parts`, in order. Raises CheckpointError."""
        return self.in_order(lambda span: work(self.read(name, span)), self.spans(parts))


def all_rows(matrices: Iterable[Matrix]) -> list[RowSpan]:
    return [(matrix, 0, matrix.shape[0]) for matrix in matrices]
