"""Builder for one layer of a graph: its tensors, matrix products, biases and norms.

Heads, and the tensors that contain them, are padded to a width that GroupQueryAttention accepts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph.formats import MatrixKind
from stem_edge.graph.ir import CONTRIB, Graph
from stem_edge.graph.linear import Products
from stem_edge.graph.names import SLOT_IDS, WANTED, head_width
from stem_edge.graph.weight_plan import KvFormat
from stem_edge.layers import Layer
from stem_edge.tables.rows import RecordLayout

Shapes = dict[str, tuple[int, ...]]
NORM = "SimplifiedLayerNormalization"


class LayerGraph:
    """Builder for one layer of a graph: emits operations that both attention and FFN use.

    layout: layout of rows in the row cache's slots; None for a dense model.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: RecordLayout | None,
        products: Products,
        number: int,
        kv: KvFormat,
        slot_ids: str = SLOT_IDS,
        positions: str = "",
    ) -> None:
        self.config, self.layout, self.number = config, layout, number
        self.slot_ids = slot_ids  # [B, T]: row cache slots of the tokens' rows
        self.kv = kv
        self.positions = positions  # [B, T]; empty if the KV cache holds the whole context
        self.graph: Graph = products.graph
        self.at = f"layers.{number}."  # prefix of every name in this layer
        self.kind, self.shape = config.ffn_kind(number), config.layer(number)
        self.products, self._shapes = products, layer_shapes(config, number)

    def product(self, name: str, kind: MatrixKind, x: str, matrices: Sequence[str]) -> str:
        """Emit x [B, T, K] times the transpose of the layer's stacked matrices, plus biases."""
        shapes = [self._shapes[name] for name in matrices]
        rows = sum(shape[0] for shape in shapes)
        parts = tuple(self.at + name for name in matrices)
        result = self.products.product(self.at + name, kind, x, parts, (rows, shapes[0][1]))
        if not any(n + ".bias" in self._shapes for n in matrices):
            return result
        biases = tuple(part + ".bias" for part in parts)
        joined = self.products.vector(result + ".bias", rows, biases)
        return self.graph.add("Add", [result, joined], result + ".biased")

    def vector(self, part: str) -> str:
        """Reserve space in the weight file for the float32 vector `part`; return its name."""
        return self.products.vector(self.at + part, self._shapes[part][0])

    def matrix(self, part: str) -> str:
        """Reserve space in the weight file for the float32 matrix `part`; return its name."""
        return self.products.matrix(self.at + part, self._shapes[part])

    def rms_norm(self, name: str, x: str, part: str, eps: float) -> str:
        """Emit the RMS norm of x over its last axis, with the layer's weight `part`."""
        (size,) = self._shapes[part]
        weight = self.products.vector(name, size, (self.at + part,))
        return norm(self.graph, x, weight, eps)

    def activated(self, gate: str, name: str) -> str:
        """Emit the activation of the FFN's gate: tanh GELU or SiLU, depending on the model."""
        if self.config.activation == "gelu":
            return self.graph.node("FastGelu", [gate], [self.at + name], CONTRIB)
        return self.graph.node("QuickGelu", [gate], [self.at + name], CONTRIB, alpha=1.0)

    def post_norm(self, name: str, x: str) -> str:
        """Emit the norm `name` of x, after attention or FFN; or return x if the model has none."""
        if not self.config.post_norms:
            return x
        return self.rms_norm(self.at + name, x, name, self.config.norm_eps)

    def scaled(self, residual: str, delta: str) -> str:
        """Emit (residual + delta) * scale, where scale is a trained number of the layer."""
        name = self.at + "layer_scale"
        scale = self.products.vector(name, 1)
        total = self.graph.add("Add", [residual, delta], name + ".sum")
        return self.graph.add("Mul", [total, scale], name + ".out")

    def add_norm(self, name: str, residual: str, delta: str, consumer: str) -> tuple[str, str]:
        """Emit the RMS norm of residual + delta; return (normed sum, sum).

        consumer: matrix product, if it alone reads the normed sum, else "". delta may be "".
        """
        full, eps, (size,) = self.at + name, self.config.norm_eps, self._shapes[name]
        weight = self.products.norm(full, size, consumer and self.at + consumer)
        if not delta:
            return norm(self.graph, residual, weight, eps), residual
        total = f"{full}.sum"
        normed = self.graph.node(
            "SkipSimplifiedLayerNormalization",
            [residual, delta, weight],
            [f"{full}.out", "", "", total],
            CONTRIB,
            epsilon=eps,
        )
        return normed, total


def norm(graph: Graph, x: str, weight: str, eps: float) -> str:
    """Emit an RMS norm over the last axis of x, as one operator of onnxruntime."""
    return graph.add(NORM, [x, weight], weight + ".out", axis=-1, epsilon=eps)


def layer_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Return name -> shape of a layer's tensors, with each head padded to `head_width`."""
    described = config.layer(layer)
    return {n: _padded(described, n, s) for n, s in config.layer_shapes(layer).items()}


def kind_of(name: str) -> MatrixKind:
    """Return the matrix kind of a tensor: qkv for wq, wk and wv, else the last part of its name."""
    part = name.rsplit(".", 1)[-1]
    kind: MatrixKind = "qkv" if part in ("wq", "wk", "wv") else part  # type: ignore[assignment]
    return kind


def _padded(layer: Layer, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    width, part = head_width(layer), name.removesuffix(".bias").rsplit(".", 1)[-1]
    if part in ("wq", "wk", "wv", "q_norm", "k_norm"):
        return (shape[0] // layer.head_dim * width, *shape[1:])
    if part == "wo" and len(shape) == 2:
        return shape[0], shape[1] // layer.head_dim * width
    return shape


def wanted(graph: Graph, x: str) -> str:
    """Emit the selection of n tokens whose logits are requested: x [B, T, ...] -> [B, n, ...]."""
    graph.input(WANTED, np.int64, ["n"])
    return graph.add("Gather", [x, WANTED], f"wanted.{x}", axis=1)
