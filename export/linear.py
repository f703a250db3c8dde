"""Matrices as onnxruntime multiplies with them: three ways to store one, behind one interface.

Every way reads a matrix in pieces, on several threads, and keeps account of what it lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import numpy as np

from stem_edge.errors import ExportError
from stem_edge.export.checkpoint import check_finite
from stem_edge.export.graph import CONTRIB, Graph
from stem_edge.export.parallel import in_order
from stem_edge.export.report import ErrorMeter
from stem_edge.quantize import (
    F32,
    MIN_BLOCK,
    U8,
    dequantize_blocks,
    fitting_block,
    quantize_blocks,
)
from stem_edge.reference import Matrix, whole

PIECE_VALUES = 1 << 22  # values worked on at a time, in each thread: 16 MiB of float32
INT8_MAX = 127
# Below this, a channel's greatest value over the median channel's is no outlier worth a pass.
OUTLIER = 8.0
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

    def product(self, name: str, kind: str, x: str, matrices: Sequence[Matrix]) -> str:
        """Emit the product; returns the name of its result. `kind` is for the error report."""


class FloatLinear:
    """float32 matrices."""

    def __init__(self, graph: Graph, weights: Weights) -> None:
        self._graph, self._weights = graph, weights

    def norm(self, name: str, weight: F32, consumer: str, matrices: Sequence[Matrix]) -> F32:
        """The weight as it is."""
        return weight

    def product(self, name: str, kind: str, x: str, matrices: Sequence[Matrix]) -> str:
        """FusedMatMul with a transposed matrix."""
        shape = [sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]]
        pieces = self._weights.stream(name, matrices, lambda values: values)
        weight = self._graph.stream(name + ".weight", np.float32, shape, pieces)
        return self._graph.node("FusedMatMul", [x, weight], [name], CONTRIB, transB=1)


class BlockLinear:
    """int4 or int8 codes, a scale for each block of inputs: MatMulNBits, int8 activations."""

    def __init__(self, graph: Graph, weights: Weights, bits: int, block_size: int) -> None:
        self._graph, self._weights = graph, weights
        self._bits, self._block_size = bits, block_size

    def norm(self, name: str, weight: F32, consumer: str, matrices: Sequence[Matrix]) -> F32:
        """The weight as it is."""
        return weight

    def product(self, name: str, kind: str, x: str, matrices: Sequence[Matrix]) -> str:
        """MatMulNBits; a matrix of very many rows becomes several of them."""
        rows, width = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
        step = max(1, SPLIT_VALUES // width)
        if len(matrices) > 1 or rows <= 2 * step:
            return self._one(name, kind, x, matrices)
        starts = range(0, rows, step)
        parts = [_RowRange(matrices[0], at, min(at + step, rows)) for at in starts]
        names = [self._one(f"{name}.{n}", kind, x, [part]) for n, part in enumerate(parts)]
        return self._graph.node("Concat", names, [name], axis=-1)

    def _one(self, name: str, kind: str, x: str, matrices: Sequence[Matrix]) -> str:
        rows, width = sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1]
        codes, scales, block = quantized(
            self._weights, name, kind, matrices, self._bits, self._block_size
        )
        shape = [rows, width // block, block * self._bits // 8]
        weight = name + ".weight"
        names = [
            self._graph.stream(weight + ".codes", np.uint8, shape, codes),
            self._graph.constant(weight + ".scales", np.concatenate(scales).reshape(-1)),
        ]
        return self._graph.node(
            "MatMulNBits",
            [x, *names],
            [name],
            CONTRIB,
            K=width,
            N=rows,
            bits=self._bits,
            block_size=block,
            accuracy_level=4,
        )


class TokenLinear:
    """int8 matrices with a scale for each output, and activations scaled for each token.

    Integer products this coarse are the fastest for many tokens, and the least exact where some
    input channels are far greater than the others. So channels are balanced against the columns of
    the matrix first (SmoothQuant, arXiv 2211.10438): x / s times W * s, folded into the norm before
    it, or a multiplication of its own where there is no norm and outliers were seen.
    """

    def __init__(self, graph: Graph, weights: Weights, peaks: Mapping[str, F32]) -> None:
        self._graph, self._weights, self._peaks = graph, weights, peaks
        self._balance: dict[str, F32] = {}  # consumer -> s, of those whose norm is divided already
        self._quantized: dict[str, tuple[str, str]] = {}  # x -> its codes and scales
        self._declared = False

    def norm(self, name: str, weight: F32, consumer: str, matrices: Sequence[Matrix]) -> F32:
        """The weight over the consumer's balance."""
        self._balance[consumer] = self._balance_of(consumer, matrices)
        return np.asarray(weight / self._balance[consumer], np.float32)

    def product(self, name: str, kind: str, x: str, matrices: Sequence[Matrix]) -> str:
        """Quantize x once for all its consumers, multiply integers, scale the result."""
        consumer = name.replace(".up", ".gate")  # both have the same input
        if consumer in self._balance:
            balance = self._balance[consumer]
        else:
            x, balance = self._divide(name, x, matrices)
        codes, scale = self._quantize(x)

        def quantize(values: F32) -> tuple[U8, F32]:
            values = values * balance
            scales = np.abs(values).max(axis=1, keepdims=True) / np.float32(INT8_MAX)
            whole_codes = np.rint(values / np.where(scales > 0, scales, 1))
            self._weights.meter.add("prefill", values, whole_codes * scales)
            return whole_codes.astype(np.int8).view(np.uint8), scales[:, 0]

        pieces = list(self._weights.stream(name, matrices, quantize))
        matrix = np.ascontiguousarray(np.concatenate([piece for piece, _ in pieces]).T)
        names = [
            self._graph.constant(name + ".codes", matrix.view(np.int8)),
            self._graph.constant(name + ".scales", np.concatenate([each for _, each in pieces])),
        ]
        raw = self._graph.node(
            "MatMulIntegerToFloat",
            [codes, names[0], "one", names[1], "middle"],
            [name + ".raw"],
            CONTRIB,
        )
        return self._graph.node("Mul", [raw, scale], [name])

    def _divide(self, name: str, x: str, matrices: Sequence[Matrix]) -> tuple[str, F32]:
        width = matrices[0].shape[1]
        peaks = self._peaks.get(name)
        if peaks is None or len(peaks) != width or peaks.max() <= OUTLIER * np.median(peaks):
            return x, np.ones(width, np.float32)
        balance = self._balance_of(name, matrices)
        inverse = self._graph.constant(name + ".balance", 1 / balance)
        return self._graph.node("Mul", [x, inverse], [name + ".balanced"]), balance

    def _balance_of(self, consumer: str, matrices: Sequence[Matrix]) -> F32:
        width = matrices[0].shape[1]
        peaks = self._peaks.get(consumer)
        if peaks is None or len(peaks) != width:
            return np.ones(width, np.float32)
        columns = np.maximum.reduce([np.abs(whole(matrix)).max(axis=0) for matrix in matrices])
        known = (peaks > 0) & (columns > 0)
        balance = np.sqrt(np.where(known, peaks, 1) / np.where(known, columns, 1))
        balance = np.where(known, balance, np.median(balance[known]) if known.any() else 1)
        return np.asarray(balance, np.float32)

    def _quantize(self, x: str) -> tuple[str, str]:
        """Codes uint8 [1, T, K] of x and its scales [1, T, 1]."""
        if x in self._quantized:
            return self._quantized[x]
        graph = self._graph
        if not self._declared:
            self._declared = True
            graph.constant("last", np.array([2], np.int64))
            graph.constant("flat", np.array([-1], np.int64))
            graph.constant("step", np.array(1 / INT8_MAX, np.float32))
            graph.constant("least", np.array(np.finfo(np.float32).tiny, np.float32))
            graph.constant("one", np.array(1, np.float32))
            graph.constant("middle", np.array(128, np.uint8))
        size = graph.node("Abs", [x], [x + ".abs"])
        peak = graph.node("ReduceMax", [size, "last"], [x + ".peak"], keepdims=1)
        step = graph.node("Mul", [peak, "step"], [x + ".step"])
        scale = graph.node("Max", [step, "least"], [x + ".scale"])
        flat = graph.node("Reshape", [scale, "flat"], [x + ".scales"])
        count = graph.node("Shape", [flat], [x + ".count"])
        # uint8 around 128: the int8 x int8 form takes a path that is 30 times slower.
        zeros = graph.fill(count, x + ".middle", np.array([128], np.uint8))
        codes = graph.node("QuantizeLinear", [x, flat, zeros], [x + ".codes"], axis=1)
        self._quantized[x] = codes, scale
        return codes, scale


class _RowRange:
    """Rows start..stop of a matrix."""

    def __init__(self, matrix: Matrix, start: int, stop: int) -> None:
        self._matrix, self._start = matrix, start
        self.shape: tuple[int, ...] = (stop - start, matrix.shape[1])

    def rows(self, start: int, stop: int) -> F32:
        """Rows of the range."""
        return self._matrix.rows(self._start + start, self._start + stop)


def quantized(
    weights: Weights, name: str, kind: str, matrices: Sequence[Matrix], bits: int, wanted: int
) -> tuple[Iterator[U8], list[F32], int]:
    """A stream of codes, the scales [n, K/block] as the stream runs, and the block size."""
    width = matrices[0].shape[1]
    block = fitting_block(width, wanted)
    if not block:
        raise ExportError(
            f"{name}: its width {width} is not a multiple of {MIN_BLOCK}, so it cannot be "
            "quantized in blocks; use --backbone fp32 --head fp32"
        )

    def work(values: F32) -> tuple[U8, F32]:
        codes, scales = quantize_blocks(values, bits, block)
        weights.meter.add(kind, values, dequantize_blocks(codes, scales, bits))
        return codes, scales

    scales: list[F32] = []

    def codes() -> Iterator[U8]:
        for piece, piece_scales in weights.stream(name, matrices, work):
            scales.append(piece_scales)
            yield piece

    return codes(), scales, block


def _spans(matrices: Sequence[Matrix]) -> Iterator[tuple[Matrix, int, int]]:
    for matrix in matrices:
        step = max(1, PIECE_VALUES // matrix.shape[1])
        for start in range(0, matrix.shape[0], step):
            yield matrix, start, min(start + step, matrix.shape[0])
