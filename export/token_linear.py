"""Matrices for prompts: int8 products of many tokens at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from stem_edge.bundle import MatrixKind
from stem_edge.export.graph import CONTRIB, Graph
from stem_edge.export.linear import Weights
from stem_edge.quantize import F32, U8
from stem_edge.reference import Matrix, whole

INT8_MAX = 127
# Below this, a channel's greatest value over the median channel's is no outlier worth a pass.
OUTLIER = 8.0


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

    def product(self, name: str, kind: MatrixKind, x: str, matrices: Sequence[Matrix]) -> str:
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
