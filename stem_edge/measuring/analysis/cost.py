"""Costs and savings of STEM layers, counted as in the STEM paper (arXiv 2601.10639).

Sections 3.2.3 to 3.2.5 and Table 1 of the paper count a multiply-add as one FLOP, Table 3 as two.
Here the former are called multiply-adds. Figures are exact integers wherever the formula is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression
from typing import NamedTuple, Self

from stem_edge.config import ModelConfig

FFN_MATRICES = ("gate", "up", "down", "project", "router")
DENSE_MATRICES, STEM_MATRICES = 3, 2  # of d x d_ff in an FFN: gate, down, and up if it is dense
FLOPS_PER_PARAMETER = 2  # Table 3: a multiplication and an addition


class Pair(NamedTuple):
    """A quantity of a layer, with a dense FFN and with a STEM FFN."""

    dense: int
    stem: int

    @property
    def saved(self) -> int:
        """Saving by STEM; below 0 if it costs more."""
        return self.dense - self.stem

    @property
    def saving_fraction(self) -> float:
        """Saving as a share of the dense layer."""
        return self.saved / self.dense

    def figures(self) -> dict[str, float | None]:
        """Return all figures, for JSON."""
        share = self.saving_fraction if self.dense else None
        return {**self._asdict(), "saved": self.saved, "saving_fraction": share}


@dataclass(frozen=True)
class LayerShape:
    """Widths of a layer."""

    dim: int  # d
    d_ff: int
    queries: int  # heads x head width
    keys: int  # key and value heads x head width; less than `queries` in grouped-query attention
    stem_parameters: int  # in the FFN of a STEM layer without its row; the paper's: 2 d d_ff
    row_values: int  # the paper's: d_ff
    row_multiply_adds: int = 0  # of a row that is an expert's matrices, or several that are mixed

    @classmethod
    def as_paper(cls, dim: int, d_ff: int) -> Self:
        """Return the paper's layer: its attention is as wide as the model, 4 d^2 parameters."""
        return cls(dim, d_ff, dim, dim, STEM_MATRICES * dim * d_ff, d_ff)

    @classmethod
    def of(cls, model: ModelConfig) -> Self:
        """Return a model's layer as it is built."""
        queries, keys = (heads * model.head_dim for heads in (model.n_heads, model.n_kv_heads))
        layers = model.stem_layers
        if not layers:
            return replace(cls.as_paper(model.dim, model.d_ff), queries=queries, keys=keys)
        shapes = model.layer_shapes(layers[0])
        parameters = sum(math.prod(shapes[name]) for name in FFN_MATRICES if name in shapes)
        row = model.record_values // len(model.row_layers)
        summed = row if model.n_experts or model.row_experts else 0
        return cls(model.dim, model.d_ff, queries, keys, parameters, row, summed)

    @property
    def attention_parameters(self) -> int:
        """Parameters of the four projections; the paper's: 4 d^2."""
        return 2 * self.dim * (self.queries + self.keys)


def ffn_multiply_adds(shape: LayerShape) -> Pair:
    """Return the multiply-adds of an FFN for a token: 3 d d_ff + d_ff, Table 1."""
    loads = ffn_loads(shape)
    return Pair(loads.dense + shape.d_ff, loads.stem + shape.row_multiply_adds + shape.d_ff)


def ffn_loads(shape: LayerShape) -> Pair:
    """Return the parameters that an FFN loads for a decode step of any batch: 3 d d_ff, Table 1."""
    return Pair(DENSE_MATRICES * shape.dim * shape.d_ff, shape.stem_parameters)


def layer_multiply_adds(shape: LayerShape, length: int) -> Pair:
    """Return the multiply-adds of a layer for a token: F_train / L = 4 d^2 + 2 L d + 3 d d_ff, 3.2.3.

    Every token attends to all `length` tokens: the paper does not halve that for the causal mask.
    """
    attention, ffn = shape.attention_parameters + 2 * length * shape.queries, ffn_loads(shape)
    return Pair(attention + ffn.dense, attention + ffn.stem + shape.row_multiply_adds)


def layer_loads(shape: LayerShape, length: int) -> Pair:
    """Return the values of KV cache and parameters that a layer loads for a decode step: M_dec, 3.2.3.

    They are 4 d^2 + 2 L d + 3 d d_ff. STEM saves the share d_ff / (4 d + 2 L + 3 d_ff).
    """
    shared, ffn = shape.attention_parameters + 2 * length * shape.keys, ffn_loads(shape)
    return Pair(shared + ffn.dense, shared + ffn.stem)


class Counting(NamedTuple):
    """Parameters of a model and of its dense twin, which has up projections and no table."""

    dense_total: int
    dense_active: int  # active: used by one token, in the paper's words
    total: int
    active: int

    @property
    def dense_gflop(self) -> float:
        """GFLOP a token of the dense twin."""
        return FLOPS_PER_PARAMETER * self.dense_active / 1e9

    @property
    def gflop(self) -> float:
        """GFLOP a token: 2 x active parameters, no attention over the context (Table 3)."""
        return FLOPS_PER_PARAMETER * self.active / 1e9

    def figures(self) -> dict[str, float]:
        """Return all figures, for JSON."""
        gflop = {"dense_gflop_per_token": self.dense_gflop, "gflop_per_token": self.gflop}
        return {f"{name}_parameters": count for name, count in self._asdict().items()} | gflop


class ModelCost(NamedTuple):
    """Counts of a model as in the paper's Table 3, and as it is stored and used.

    They differ in two ways. The paper's total keeps what the tables replace, except with experts.
    Its active parameters include the whole embedding of an untied model, of which a token uses a row.
    """

    paper: Counting
    stored: Counting


def model_cost(model: ModelConfig) -> ModelCost:
    """Count the parameters of a model in both ways."""
    dense = model.dense_twin()
    backbone, twin = model.backbone_parameters, dense.backbone_parameters
    tables, record = model.table_parameters, model.record_values
    kept = backbone if model.stem_ffn == "hash-moe" else twin
    return ModelCost(
        paper=Counting(twin, twin, kept + tables, backbone + record),
        stored=Counting(twin, dense.active_parameters, backbone + tables, model.active_parameters),
    )


class CurvePoint(NamedTuple):
    """Rows that the first `length` tokens of a text use."""

    length: int
    distinct: int  # L_uniq
    row_parameters: int  # |S| d_ff L_uniq, 3.2.5
    flash_nbytes: int  # the record of each distinct token, read once


class HeapsFit(NamedTuple):
    """Heaps' law: L_uniq ~ scale L^exponent."""

    scale: float
    exponent: float


def usage_curve(
    token_ids: Sequence[int], model: ModelConfig, record_nbytes: int
) -> list[CurvePoint]:
    """Count distinct row parameters at context lengths 1, 2, 4, ... and the whole text's (3.2.5).

    `record_nbytes` is 0 for a dense model.
    """
    seen: set[int] = set()
    points: list[CurvePoint] = []
    for length, token in enumerate(token_ids, 1):
        seen.add(token)
        if length & (length - 1) == 0 or length == len(token_ids):
            n = len(seen)
            points.append(CurvePoint(length, n, n * model.record_values, n * record_nbytes))
    return points


def fit_heaps(points: Sequence[CurvePoint]) -> HeapsFit | None:
    """Fit Heaps' law by least squares in log-log; None for fewer than two lengths."""
    if len(points) < 2:
        return None
    x = [math.log(point.length) for point in points]
    exponent, intercept = linear_regression(x, [math.log(point.distinct) for point in points])
    return HeapsFit(math.exp(intercept), exponent)
