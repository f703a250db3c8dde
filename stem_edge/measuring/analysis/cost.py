"""What STEM layers cost and save, as the STEM paper counts (arXiv 2601.10639).

Sections 3.2.3 to 3.2.5 and Table 1 count a multiply-add once and call it a FLOP; Table 3 counts it
twice. Here the first are called multiply-adds. All figures are exact integers where the formula is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import linear_regression
from typing import NamedTuple, Self

from stem_edge.config import ModelConfig

FFN_MATRICES = ("gate", "up", "down", "project")
DENSE_MATRICES, STEM_MATRICES = 3, 2  # of d x d_ff in an FFN: gate, down, and up where it is dense
FLOPS_PER_PARAMETER = 2  # Table 3: a multiplication and an addition


@dataclass(frozen=True)
class Pair:
    """One quantity of a layer, with a dense FFN and with a STEM FFN."""

    dense: int
    stem: int

    @property
    def saved(self) -> int:
        """What STEM saves; below 0 where it costs more."""
        return self.dense - self.stem

    @property
    def saving_fraction(self) -> float:
        """The saving, of what the dense layer takes."""
        return self.saved / self.dense


@dataclass(frozen=True)
class LayerShape:
    """Widths of one layer."""

    dim: int  # d
    d_ff: int
    queries: int  # heads x head width
    keys: int  # key and value heads x head width; below `queries` with grouped-query attention
    stem_parameters: int  # of the FFN of a STEM layer, its row apart: 2 d d_ff in the paper's
    row_values: int  # of a row: d_ff in the paper's

    @classmethod
    def as_paper(cls, dim: int, d_ff: int) -> Self:
        """The paper's layer: all of attention is as wide as the model, 4 d^2 parameters."""
        return cls(dim, d_ff, dim, dim, STEM_MATRICES * dim * d_ff, d_ff)

    @classmethod
    def of(cls, model: ModelConfig) -> Self:
        """A model's layer as it is built."""
        queries, keys = (heads * model.head_dim for heads in (model.n_heads, model.n_kv_heads))
        layers = model.stem_layers
        if not layers:
            return replace(cls.as_paper(model.dim, model.d_ff), queries=queries, keys=keys)
        shapes = model.layer_shapes(layers[0])
        matrices = [shapes[name] for name in FFN_MATRICES if name in shapes]
        parameters = sum(rows * columns for rows, columns in matrices)
        row = model.record_values // len(layers)
        return cls(model.dim, model.d_ff, queries, keys, parameters, row)

    @property
    def row_multiply_adds(self) -> int:
        """Multiply-adds of a row that is matrices itself, an expert's; a vector has none."""
        return self.row_values if self.row_values > self.d_ff else 0

    @property
    def attention_parameters(self) -> int:
        """Parameters of the four projections: 4 d^2 in the paper's layer."""
        return 2 * self.dim * (self.queries + self.keys)


def ffn_multiply_adds(shape: LayerShape) -> Pair:
    """Multiply-adds of an FFN for a token: 3 d d_ff + d_ff, Table 1."""
    dense = DENSE_MATRICES * shape.d_ff * shape.dim + shape.d_ff
    return Pair(dense, shape.stem_parameters + shape.row_multiply_adds + shape.d_ff)


def ffn_loads(shape: LayerShape) -> Pair:
    """Parameters that an FFN loads for one decode step, whatever the batch: 3 d d_ff, Table 1."""
    return Pair(DENSE_MATRICES * shape.dim * shape.d_ff, shape.stem_parameters)


def layer_multiply_adds(shape: LayerShape, length: int) -> Pair:
    """Multiply-adds of a layer for a token: F_train / L = 4 d^2 + 2 L d + 3 d d_ff, 3.2.3.

    Every token looks at all `length` tokens: the paper takes no half off for the causal mask.
    """
    attention, ffn = shape.attention_parameters + 2 * length * shape.queries, ffn_loads(shape)
    return Pair(attention + ffn.dense, attention + ffn.stem + shape.row_multiply_adds)


def layer_loads(shape: LayerShape, length: int) -> Pair:
    """Values, KV cache and parameters, that a layer loads for one decode step: M_dec, 3.2.3.

    4 d^2 + 2 L d + 3 d d_ff, of which STEM saves d_ff / (4 d + 2 L + 3 d_ff).
    """
    shared, ffn = shape.attention_parameters + 2 * length * shape.keys, ffn_loads(shape)
    return Pair(shared + ffn.dense, shared + ffn.stem)


@dataclass(frozen=True)
class Counting:
    """Parameters of a whole model and of its dense twin, counted in one way.

    The dense twin is the same model with up projections and no table.
    """

    dense_total: int
    dense_active: int  # active: what the paper calls used by one token
    total: int
    active: int

    @property
    def dense_gflop(self) -> float:
        """GFLOP a token of the dense twin."""
        return FLOPS_PER_PARAMETER * self.dense_active / 1e9

    @property
    def gflop(self) -> float:
        """Per token: 2 x active parameters, no attention over the context (Table 3)."""
        return FLOPS_PER_PARAMETER * self.active / 1e9


@dataclass(frozen=True)
class ModelCost:
    """One model, counted as the paper's Table 3 does and as it is stored and used.

    They differ in two ways. The paper's total keeps what the tables replace, but for experts. Its
    active parameters hold the whole embedding of an untied model: a token uses one row of it.
    """

    paper: Counting
    stored: Counting


def model_cost(model: ModelConfig) -> ModelCost:
    """Both countings of a model."""
    dense = model.dense_twin()
    backbone, twin = model.backbone_parameters, dense.backbone_parameters
    tables, record = model.table_parameters, model.record_values
    kept = backbone if model.stem_ffn == "hash-moe" else twin
    return ModelCost(
        paper=Counting(twin, twin, kept + tables, backbone + record),
        stored=Counting(twin, dense.active_parameters, backbone + tables, model.active_parameters),
    )


@dataclass(frozen=True)
class CurvePoint:
    """What the first `length` tokens of a text activate in the tables."""

    length: int
    distinct: int  # L_uniq
    row_parameters: int  # |S| d_ff L_uniq, 3.2.5
    flash_nbytes: int  # each distinct token's record read once, from an empty row cache


class HeapsFit(NamedTuple):
    """L_uniq ~ scale L^exponent."""

    scale: float
    exponent: float


def usage_curve(
    token_ids: Sequence[int], model: ModelConfig, record_nbytes: int
) -> list[CurvePoint]:
    """Distinct row parameters at context lengths 1, 2, 4, ... and at the whole text (3.2.5).

    `record_nbytes` is 0 for a dense model.
    """
    values = model.record_values
    seen: set[int] = set()
    points: list[CurvePoint] = []
    for length, token in enumerate(token_ids, 1):
        seen.add(token)
        if length & (length - 1) == 0 or length == len(token_ids):
            n = len(seen)
            points.append(CurvePoint(length, n, n * values, n * record_nbytes))
    return points


def fit_heaps(points: Sequence[CurvePoint]) -> HeapsFit | None:
    """Heaps' law by least squares in log-log; None of fewer than two lengths."""
    if len(points) < 2:
        return None
    x = [math.log(point.length) for point in points]
    exponent, intercept = linear_regression(x, [math.log(point.distinct) for point in points])
    return HeapsFit(math.exp(intercept), exponent)
