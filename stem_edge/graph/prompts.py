"""Matrices for prompts: int8 products of many tokens at once."""

from __future__ import annotations

import numpy as np

from stem_edge.formats import MatrixKind
from stem_edge.graph.ir import CONTRIB, Graph
from stem_edge.graph.linear import vector
from stem_edge.graph.plan import Balance, Columns, WeightPlan

INT8_MAX = 127


class PromptProducts:
    """int8 matrices with a scale for each output, and activations scaled for each token.

    Integer products this coarse are the fastest for many tokens, and the least exact where some
    input channels are far greater than the others. So channels are balanced against the columns of
    the matrix (SmoothQuant, arXiv 2211.10438): x / s times W * s, folded into the norm before it, or
    a multiplication of its own in products without a norm that are named in `balanced`.
    """

    def __init__(self, graph: Graph, plan: WeightPlan, balanced: tuple[str, ...]) -> None:
        self.graph, self.plan = graph, plan
        self._balanced = frozenset(balanced)  # a manifest may name very many
        self._normed: set[str] = set()  # consumers whose norm is divided already
        self._quantized: dict[str, tuple[str, str]] = {}  # x -> its codes and scales

    def norm(self, name: str, size: int, consumer: str) -> str:
        """The weight over the consumer's balance."""
        self._normed.add(consumer)
        return vector(self.graph, self.plan, name, size, (name,), divided_by=consumer)

    def product(
        self, name: str, kind: MatrixKind, x: str, parts: tuple[str, ...], shape: tuple[int, int]
    ) -> str:
        """Quantize x once for all its consumers, multiply integers, scale the result."""
        (rows, width), graph = shape, self.graph
        consumer = name.replace(".up", ".gate")  # both have the same input
        if consumer not in self._normed:
            consumer = name if name in self._balanced else ""
            if consumer:
                tensor = self.plan.place(name + ".balance", np.float32, (width,))
                self.plan.items.append(Balance(tensor, consumer))
                x = graph.add("Mul", [x, graph.weight(tensor)], name + ".balanced")
        codes, scale = self._quantize(x)
        matrix = self.plan.place(name + ".codes", np.int8, (width, rows))
        scales = self.plan.place(name + ".scales", np.float32, (rows,))
        self.plan.items.append(Columns(name, parts, consumer, matrix, scales))
        middle = graph.constant("middle", np.array(128, np.uint8))
        raw = graph.node(
            "MatMulIntegerToFloat",
            [codes, graph.weight(matrix), graph.float(1.0), graph.weight(scales), middle],
            [name + ".raw"],
            CONTRIB,
        )
        return graph.add("Mul", [raw, scale], name)

    def _quantize(self, x: str) -> tuple[str, str]:
        """Codes uint8 [1, T, K] of x and its scales [1, T, 1]."""
        if x in self._quantized:
            return self._quantized[x]
        graph = self.graph
        size = graph.add("Abs", [x], x + ".abs")
        peak = graph.add("ReduceMax", [size, graph.sizes([2])], x + ".peak", keepdims=1)
        step = graph.add("Mul", [peak, graph.float(1 / INT8_MAX)], x + ".step")
        least = graph.float(float(np.finfo(np.float32).tiny))
        scale = graph.add("Max", [step, least], x + ".scale")
        flat = graph.reshape(scale, [-1], x + ".scales")
        count = graph.add("Shape", [flat], x + ".count")
        # uint8 around 128: the int8 x int8 form takes a path that is 30 times slower.
        zeros = graph.fill(count, x + ".middle", np.array([128], np.uint8))
        codes = graph.add("QuantizeLinear", [x, flat, zeros], x + ".codes", axis=1)
        self._quantized[x] = codes, scale
        return codes, scale
