"""Parts that the attention and the FFN of a layer share: inputs, tensors, products, norms, activation.

Sizes are in ggml's order, innermost first: hidden states are [dim, T].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stem_edge.config import ModelConfig
from stem_edge.ggml import types as ggml_types
from stem_edge.layers import Rope
from stem_edge.runtime.backends.ggml.graph import GgmlGraph, Tensor
from stem_edge.runtime.backends.ggml.kv_cache import KvCache
from stem_edge.runtime.backends.ggml.weights import Weights

# GELU in its tanh form: x times the logistic function of LINEAR (x + CUBIC x^3).
LINEAR, CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715


@dataclass(frozen=True)
class Cells:
    """The `count` KV cache cells that T tokens attend to. own: cells for their keys and values."""

    count: int
    own: Tensor  # I64 [T]
    mask: Tensor  # F16 [count, T]: 0 or -inf


@dataclass(frozen=True)
class Attended:
    """KV cache of one sequence, and the cells that its tokens attend to, by window in tokens."""

    kv: KvCache
    cells: Mapping[int, Cells]  # window -> cells


@dataclass(frozen=True)
class LayerInputs:
    """Inputs that all layers of a graph for T tokens share.

    sequences: one of T tokens, or T of one token. row_shares: weight of each row in each token's
    mean of rows. ones: T times the position 1, at which ggml's RoPE operator turns by 90 degrees.
    """

    count: int  # T
    ones: Tensor  # I32 [T]
    sequences: Sequence[Attended]
    slot_ids: Tensor | None  # I32 [T], or [R] if a token's row is a mean of rows; None without rows
    row_shares: Tensor | None  # F32 [R, T]
    rope_tables: Mapping[Rope, tuple[Tensor, Tensor]]  # F32 [head_dim, T]: cosines and sines
    embedded: Tensor  # F32 [dim, T]: hidden states before the model's first layer

    def last(self, graph: GgmlGraph, dim: int, count: int) -> LayerInputs:
        """Return the inputs of the last `count` tokens, for layers that store no keys and values."""
        skipped = self.count - count
        if not skipped:
            return self

        def ids(tensor: Tensor) -> Tensor:
            return graph.op("view_1d", tensor, count, skipped * ggml_types.I32.nbytes)

        def last(tensor: Tensor, width: int) -> Tensor:
            return graph.columns(tensor, ggml_types.F32, width, skipped, count)

        (sequence,) = self.sequences  # because all tokens of several have logits
        cells = {
            window: replace(
                one, mask=graph.columns(one.mask, ggml_types.F16, one.count, skipped, count)
            )
            for window, one in sequence.cells.items()
        }
        return replace(
            self,
            count=count,
            ones=ids(self.ones),
            sequences=[replace(sequence, cells=cells)],
            rope_tables={
                rope: (last(cos, rope.width), last(sin, rope.width))
                for rope, (cos, sin) in self.rope_tables.items()
            },
            slot_ids=None if self.slot_ids is None else ids(self.slot_ids),
            embedded=last(self.embedded, dim),
        )


class GgmlLayer:
    """One layer of a graph under construction: its tensors, and operators for its attention and FFN."""

    def __init__(
        self,
        graph: GgmlGraph,
        config: ModelConfig,
        weights: Weights,
        number: int,
        slots: list[Tensor],
        inputs: LayerInputs,
    ) -> None:
        """slots: tensors of the row cache for this layer, one for each part of a row."""
        self.graph, self.config, self.number = graph, config, number
        self.kind, self.shape = config.ffn_kind(number), config.layer(number)
        self.slots, self.inputs = slots, inputs
        self._weights, self._at = weights, f"layers.{number}."

    def product(self, name: str, x: Tensor) -> Tensor:
        """Return this layer's matrix `name` [M, K] times x [K, T], as [M, T], plus the bias if there is one."""
        graph, count = self.graph, self.inputs.count
        product = self._weights.product(graph, self._at + name, x, count)
        product = graph.op("reshape_2d", product, graph.ggml.nelements(product) // count, count)
        bias = self._weights.tensors.get(f"{self._at}{name}.bias")
        return product if bias is None else graph.op("add", product, bias)

    @property
    def share(self) -> float:
        """Weight of the token's row, from 0 to 1, in a layer that mixes it: (1 - share) W x + share * row."""
        return (1 + math.tanh(self._weights.number(self._at + "mix") / 2)) / 2

    def norm(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        """Return the RMS norm of x, scaled by this layer's weight `name`. eps: by default the model's."""
        weight = self._weights.tensors[self._at + name]
        return rms_norm(self.graph, x, weight, self.config.norm_eps if eps is None else eps)

    def post_norm(self, name: str, x: Tensor) -> Tensor:
        """Return x after the norm that follows attention or FFN; x itself in models without this norm."""
        return self.norm(name, x) if self.config.post_norms else x

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return activation(gate) * up, with the model's activation function.

        ggml's GELU rounds to float16, so GELU is computed with ggml's SiLU:
        gelu(x) = x logistic(f x) = silu(f x) / f, with f = LINEAR (1 + CUBIC x^2).
        """
        graph = self.graph
        if self.config.activation == "silu":
            return graph.op("swiglu_split", gate, up)
        factor = graph.op("scale_bias", graph.op("sqr", gate), LINEAR * CUBIC, LINEAR)
        return graph.op("swiglu_split", graph.op("mul", gate, factor), graph.op("div", up, factor))


def rms_norm(graph: GgmlGraph, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return graph.op("mul", graph.op("rms_norm", x, eps), weight)
