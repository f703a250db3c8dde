"""One layer of the backbone under construction: its tensors, and how its graph multiplies with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stem_edge.bundle import MatrixKind
from stem_edge.config import FFN_TERMS, ModelConfig
from stem_edge.export.checkpoint import check_finite
from stem_edge.export.graph import CONTRIB, Graph
from stem_edge.export.heads import pad_heads
from stem_edge.export.linear import Linear
from stem_edge.quantize import F32
from stem_edge.reference import Matrix, whole
from stem_edge.rows import RecordLayout


@dataclass(frozen=True)
class Source:
    """What the graphs are made from."""

    config: ModelConfig
    layout: RecordLayout | None  # of the slots; a dense model has none
    matrices: Mapping[str, Matrix]


class LayerGraph:
    """What attention and FFN need to emit themselves."""

    def __init__(self, graph: Graph, source: Source, linear: Linear, number: int) -> None:
        self.graph, self.linear, self.number = graph, linear, number
        self.config, self.layout = source.config, source.layout
        self.at = f"layers.{number}."  # begins the name of everything in this layer
        self.kind = source.config.ffn_kind(number)
        names = source.config.layer_shapes(number)
        self._tensors = pad_heads(self.config, {n: source.matrices[self.at + n] for n in names})

    @property
    def takes_row(self) -> bool:
        """Whether the FFN's gate or up has the token's row in it."""
        return any("row" in terms for terms in FFN_TERMS[self.kind].values())

    @property
    def ffn_inputs(self) -> list[str]:
        """Matrices that multiply what the FFN gets."""
        return [name for name, terms in FFN_TERMS[self.kind].items() if "matrix" in terms]

    def matrices(self, names: Sequence[str]) -> list[Matrix]:
        """Matrices by their names in the layer."""
        return [self._tensors[name] for name in names]

    def vector(self, name: str) -> F32:
        """A norm's weight or a bias."""
        return check_finite(self.at + name, 0, whole(self._tensors[name]))

    def product(self, name: str, kind: MatrixKind, x: str, matrices: Sequence[str]) -> str:
        """x [1, T, K] times the transpose of some matrices, stacked, plus their biases."""
        result = self.linear.product(self.at + name, kind, x, self.matrices(matrices))
        if not any(n + ".bias" in self._tensors for n in matrices):
            return result
        joined = self.graph.constant(
            result + ".bias", np.concatenate([self._bias(n) for n in matrices])
        )
        return self.graph.node("Add", [result, joined], [result + ".biased"])

    def _bias(self, matrix: str) -> F32:
        """Of a matrix that may have none, while those stacked with it do."""
        if matrix + ".bias" in self._tensors:
            return self.vector(matrix + ".bias")
        return np.zeros(self._tensors[matrix].shape[0], np.float32)

    def rms_norm(self, name: str, x: str, weight: F32, eps: float) -> str:
        """RMS norm over the last axis."""
        constant = self.graph.constant(name, weight)
        return self.graph.node(
            "SimplifiedLayerNormalization", [x, constant], [name + ".out"], axis=-1, epsilon=eps
        )

    def post_norm(self, name: str, x: str) -> str:
        """The norm after attention or FFN, in models that have one."""
        if not self.config.post_norms:
            return x
        return self.rms_norm(self.at + name, x, self.vector(name), self.config.norm_eps)

    def add_norm(
        self, name: str, residual: str, delta: str, consumer: str, matrices: Sequence[str]
    ) -> tuple[str, str]:
        """RMS norm of residual + delta, for `consumer`, the product of `matrices`; and that sum."""
        weight, eps = self.vector(name), self.config.norm_eps
        if matrices:
            weight = self.linear.norm(
                self.at + name, weight, self.at + consumer, self.matrices(matrices)
            )
        if not delta:
            return self.rms_norm(self.at + name, residual, weight, eps), residual
        total = f"{self.at}{name}.sum"
        normed = self.graph.node(
            "SkipSimplifiedLayerNormalization",
            [residual, delta, self.graph.constant(self.at + name, weight)],
            [f"{self.at}{name}.out", "", "", total],
            CONTRIB,
            epsilon=eps,
        )
        return normed, total
