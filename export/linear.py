"""Matrices as onnxruntime multiplies with them when it decodes: float32, or codes in blocks.

They are read in pieces, on several threads, which keep account of what was lost.
stem_edge.export.token_linear has another way, for prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import numpy as np

from stem_edge.bundle import BackboneFormat, MatrixKind
from stem_edge.errors import ExportError
from stem_edge.export.checkpoint import check_finite
from stem_edge.export.graph import CONTRIB, Graph
from stem_edge.export.parallel import in_order
from stem_edge.export.quantizers import Quantizer, Work
from stem_edge.export.report import ErrorMeter
from stem_edge.quantize import (
    F32,
    MIN_BLOCK,
    U8,
    Blocks,
    dequantize_blocks,
    fitting_block,
    zero_points,
)
from stem_edge.reference import Matrix

PIECE_VALUES = 1 << 22  # values worked on at a time, in each thread: 16 MiB of float32
# onnxruntime packs a matrix into memory of its own while it loads: a head of 128,256 rows is cut
# into pieces of this many values, so that this never takes more than a layer's matrix does.
SPLIT_VALUES = 1 << 24

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


class Linear(Protocol):
    """x [1, T, K] times the transpose of some matrices [N, K], stacked."""

    def norm(self, name: str, weight: F32, consumer: str, matrices: Sequence[Matrix]) -> F32:
        """Weight of an RMS norm whose result goes into `consumer`, the product of `matrices`."""

    def product(self, name: str, kind: MatrixKind, x: str, matrices: Sequence[Matrix]) -> str:
        """Emit the product; returns the name of its result."""


class DecodeLinear:
    """Each kind of matrix in the type that a BackboneFormat gives it; int8 activations in blocks."""

    def __init__(
        self, graph: Graph, weights: Weights, format: BackboneFormat, quantizer: Quantizer
    ) -> None:
        self._graph, self._weights = graph, weights
        self._format, self._quantizer = format, quantizer

    def norm(self, name: str, weight: F32, consumer: str, matrices: Sequence[Matrix]) -> F32:
        """The weight as it is."""
        return weight

    def product(self, name: str, kind: MatrixKind, x: str, matrices: Sequence[Matrix]) -> str:
        """FusedMatMul or MatMulNBits; a matrix of very many rows becomes several of these."""
        if self._format.bits(kind) == 32:
            weight = self._floats(name + ".weight", matrices)
            return self._graph.node("FusedMatMul", [x, weight], [name], CONTRIB, transB=1)
        coder = self._coder(name, kind, matrices)
        rows, width = _shape(matrices)
        step = max(1, SPLIT_VALUES // width)
        if len(matrices) > 1 or rows <= 2 * step:
            return self._product(name, coder, x, matrices)
        parts = [_RowRange(matrices[0], at, min(at + step, rows)) for at in range(0, rows, step)]
        names = [self._product(f"{name}.{n}", coder, x, [part]) for n, part in enumerate(parts)]
        return self._graph.node("Concat", names, [name], axis=-1)

    def rows(self, name: str, kind: MatrixKind, ids: str, result: str, matrix: Matrix) -> str:
        """Emit `result`, rows of a matrix by their ids."""
        if self._format.bits(kind) == 32:
            data = self._floats(name, [matrix])
            return self._graph.node("Gather", [data, ids], [result])
        coder, (count, width) = self._coder(name, kind, [matrix]), _shape([matrix])
        codes = self._graph.stream(
            name + ".codes", np.uint8, [count, width * coder.bits // 8], coder.stream([matrix])
        )
        scales, points = coder.scales_and_zero_points()
        if points is None:
            points = zero_points(count, width // coder.block, coder.bits)
        tensors = (
            codes,
            self._graph.constant(name + ".scales", scales),
            self._graph.constant(name + ".zero_points", points),
        )
        return gather_blocks(self._graph, tensors, ids, result, coder.bits, coder.block)

    def _floats(self, name: str, matrices: Sequence[Matrix]) -> str:
        pieces = self._weights.stream(name, matrices, lambda values: values)
        return self._graph.stream(name, np.float32, _shape(matrices), pieces)

    def _coder(self, name: str, kind: MatrixKind, matrices: Sequence[Matrix]) -> _Coder:
        bits, width = self._format.bits(kind), matrices[0].shape[1]
        block = fitting_block(width, self._format.block_size)
        if not block:
            raise ExportError(
                f"{name}: its width {width} is not a multiple of {MIN_BLOCK}, so it cannot be "
                f"quantized in blocks; use --bits {kind}=32, or --backbone fp32 --head fp32"
            )
        work = self._quantizer.worker(name, kind, bits, block)
        return _Coder(self._weights, self._quantizer, name, kind, bits, block, work)

    def _product(self, name: str, coder: _Coder, x: str, matrices: Sequence[Matrix]) -> str:
        (rows, width), bits, block = _shape(matrices), coder.bits, coder.block
        weight, shape = name + ".weight", [rows, width // block, block * bits // 8]
        names = [self._graph.stream(weight + ".codes", np.uint8, shape, coder.stream(matrices))]
        scales, points = coder.scales_and_zero_points()
        names.append(self._graph.constant(weight + ".scales", scales.reshape(-1)))
        if points is not None:
            names.append(self._graph.constant(weight + ".zero_points", points.reshape(-1)))
        return self._graph.node(
            "MatMulNBits",
            [x, *names],
            [name],
            CONTRIB,
            K=width,
            N=rows,
            bits=bits,
            block_size=block,
            accuracy_level=4,
        )


def gather_blocks(
    graph: Graph, tensors: tuple[str, str, str], ids: str, name: str, bits: int, block: int
) -> str:
    """Dequantized rows of codes, scales and zero points."""
    codes, scales, points = tensors
    return graph.node(
        "GatherBlockQuantized",
        # Zero points are explicit because kernels of different providers default differently.
        [codes, ids, scales, points],
        [name],
        CONTRIB,
        bits=bits,
        block_size=block,
        gather_axis=0,
        quantize_axis=1,
    )


class _Coder:
    """Codes of a product's matrices in a stream; scales and zero points once it has ended."""

    def __init__(
        self,
        weights: Weights,
        quantizer: Quantizer,
        name: str,
        kind: MatrixKind,
        bits: int,
        block: int,
        work: Work,
    ) -> None:
        self._weights, self._quantizer, self._work = weights, quantizer, work
        self._name, self._kind = name, kind
        self.bits, self.block = bits, block
        self._scales: list[F32] = []
        self._zero_points: list[U8] = []

    def stream(self, matrices: Sequence[Matrix]) -> Iterator[U8]:
        """Codes [n, K*bits/8], piece by piece."""
        self._scales, self._zero_points = [], []

        def work(values: F32) -> tuple[Blocks, F32]:
            blocks = self._work(values)
            stored = dequantize_blocks(blocks.codes, blocks.scales, self.bits, blocks.zero_points)
            self._weights.meter.add(self._kind, values, stored)
            return blocks, stored

        for blocks, stored in self._weights.stream(self._name, matrices, work):
            self._quantizer.keep(self._name, stored)
            self._scales.append(blocks.scales)
            if blocks.zero_points is not None:
                self._zero_points.append(blocks.zero_points)
            yield blocks.codes

    def scales_and_zero_points(self) -> tuple[F32, U8 | None]:
        """Of the last stream: [N, K/block], and [N, ceil(K/block*bits/8)] of asymmetric blocks."""
        points = np.concatenate(self._zero_points) if self._zero_points else None
        return np.concatenate(self._scales), points


class _RowRange:
    """Rows start..stop of a matrix."""

    def __init__(self, matrix: Matrix, start: int, stop: int) -> None:
        self._matrix, self._start = matrix, start
        self.shape: tuple[int, ...] = (stop - start, matrix.shape[1])

    def rows(self, start: int, stop: int) -> F32:
        """Rows of the range."""
        return self._matrix.rows(self._start + start, self._start + stop)


def _shape(matrices: Sequence[Matrix]) -> tuple[int, int]:
    return sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]


def _spans(matrices: Sequence[Matrix]) -> Iterator[tuple[Matrix, int, int]]:
    for matrix in matrices:
        step = max(1, PIECE_VALUES // matrix.shape[1])
        for start in range(0, matrix.shape[0], step):
            yield matrix, start, min(start + step, matrix.shape[0])
