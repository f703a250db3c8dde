"""The graph for prompts, and its matrix products: int8 weights and activations."""

from __future__ import annotations

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.decode import Built, declare_output
from stem_edge.graph.formats import (
    BACKBONE_DATA,
    PREFILL_DATA,
    SMALL_KINDS,
    BackboneFormat,
    MatrixKind,
)
from stem_edge.graph.ir import CONTRIB, Graph
from stem_edge.graph.kv import KvType
from stem_edge.graph.linear import Products
from stem_edge.graph.stack import Start, layers_in_order
from stem_edge.graph.weight_plan import Balance, Columns, WeightPlan, place_peaks
from stem_edge.tables.rows import RecordLayout

INT8_MAX = 127


def prompts(
    config: ModelConfig,
    layout: RecordLayout | None,
    format: BackboneFormat,
    *,
    kv: KvType = "fp32",
) -> Built:
    """Build the graph for prompts: all layers up to those that reuse other layers' K and V."""
    graph, plan = Graph(), WeightPlan(PREFILL_DATA)
    graph.input(io.HIDDEN, np.float32, [graph.sequences, "T", config.hidden_width])
    products = PromptProducts(graph, plan, format)
    cache, layers = place_peaks(WeightPlan(BACKBONE_DATA), config, format, kv), config.own_kv_layers
    cache = cache._replace(widened=kv == "int8")
    result = layers_in_order(products, config, layout, cache, range(layers), Start())
    declare_output(graph, config, result)
    return Built({io.PREFILL: graph}, plan)


class PromptProducts(Products):
    """Matrix products in int8 for prompts: weights have a scale per output, inputs one per token.

    Such products are the fastest for many tokens, but inexact if some input channels are far larger than the rest.
    So channels are balanced against the columns of the matrix (SmoothQuant, arXiv 2211.10438): (x / s)
    times (W * s). The weight of the preceding norm includes the division by s. A product without such a
    norm gets a separate multiplication if the format's `balanced` names it.

    Small matrices are multiplied as in decoding, because no norm before them could do the division.
    """

    def __init__(self, graph: Graph, plan: WeightPlan, format: BackboneFormat) -> None:
        super().__init__(graph, plan, format)
        self._balanced = frozenset(format.balanced)  # a set, because the list may be long
        self._normed: set[str] = set()  # products whose SmoothQuant factors divide a norm's weight
        self._quantized: dict[str, tuple[str, str]] = {}  # x -> its codes and scales

    def values_apart(self, layer: int) -> bool:
        """Return False: q, k and v are all int8 here, so one product computes all three."""
        return False

    def norm(self, name: str, size: int, consumer: str) -> str:
        """Reserve space for a norm's weight, divided by the SmoothQuant factors of `consumer`."""
        self._normed.add(consumer)
        return self.vector(name, size, divided_by=consumer)

    def product(
        self, name: str, kind: MatrixKind, x: str, parts: tuple[str, ...], shape: tuple[int, int]
    ) -> str:
        """Emit x, quantized to int8, times int8 tensors `parts`, stacked to `shape` [N, K]."""
        if kind in SMALL_KINDS:
            return super().product(name, kind, x, parts, shape)
        (rows, width), graph = shape, self.graph
        # gate and up have the same input, so they must share SmoothQuant factors.
        consumer = name.replace(".up", ".gate")
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
        """Emit codes (uint8) and scales [1, T, 1] of x [1, T, K], once for each x; return their names."""
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
        # uint8 around 128 instead of int8: int8 x int8 takes a path that is 30 times slower.
        zeros = graph.fill(count, x + ".middle", np.array([128], np.uint8))
        codes = graph.add("QuantizeLinear", [x, flat, zeros], x + ".codes", axis=1)
        self._quantized[x] = codes, scale
        return codes, scale
