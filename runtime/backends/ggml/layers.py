"""Layers of the model as operators of ggml; stem_edge.numerics.reference shows their mathematics.

Sizes are in ggml's order, innermost first: hidden states are [dim, T].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stem_edge.config import ModelConfig
from stem_edge.ggml import types as ggml_types
from stem_edge.ggml.library import ROPE_HALVES, ROPE_PAIRS
from stem_edge.ggml.types import TensorType
from stem_edge.layers import FFN_TERMS
from stem_edge.numerics.rope import rope_frequencies
from stem_edge.runtime.backends.ggml.graph import Graph, KvCache, Tensor
from stem_edge.runtime.backends.ggml.weights import Weights


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of a graph whose T tokens attend to the first `cells` cells."""

    cells: int
    positions: Tensor  # I32 [T]
    own_cells: Tensor  # I64 [T]: where keys and values of these tokens go
    masks: Mapping[int, Tensor]  # window -> F16 [cells, T]: 0 or -inf
    slot_ids: Tensor | None  # I32 [T]; None before the first STEM layer
    factors: Tensor | None  # F32 [head_dim / 2]: divisors of RoPE's frequencies


class Layer:
    """Emits the operators of a layer."""

    def __init__(
        self,
        graph: Graph,
        config: ModelConfig,
        weights: Weights,
        number: int,
        slots: list[Tensor],
        count: int,
    ) -> None:
        """slots: tensors of the row cache for this layer, one for each part of a row."""
        self._graph, self._config, self._number = graph, config, number
        self._count = count
        self._weights, self._slots = weights, slots
        self._at = f"layers.{number}."

    def emit(self, x: Tensor, inputs: LayerInputs, kv: KvCache) -> Tensor:
        """Return x [dim, T] after this layer."""
        mixed = self._attention(self._norm("attention_norm", x), inputs, kv)
        x = self._graph.op("add", x, self._after("attention_post_norm", mixed))
        normed = self._norm("ffn_norm", x)
        if self._config.ffn_kind(self._number) == "hash-moe":
            result = self._expert(normed, inputs)
        else:
            result = self._ffn(normed, inputs)
        return self._graph.op("add", x, self._after("ffn_post_norm", result))

    def _attention(self, x: Tensor, inputs: LayerInputs, kv: KvCache) -> Tensor:
        graph, config = self._graph, self._config
        heads, width, count = config.n_heads, config.head_dim, self._count
        q = self._rotated("wq", "q_norm", x, heads, inputs)
        k = self._rotated("wk", "k_norm", x, config.n_kv_heads, inputs)
        k = graph.op("reshape_2d", k, config.n_kv_heads * width, count)
        keys = self._cached(kv.keys[self._number], k, inputs, kv.type)
        values = self._cached(kv.values[self._number], self._product("wv", x), inputs, kv.type)
        mask = inputs.masks[config.window(self._number)]
        q = graph.op("permute", q, 0, 2, 1, 3)
        mixed = graph.op("flash_attn_ext", q, keys, values, mask, width**-0.5, 0.0, 0.0)
        return self._product("wo", graph.op("reshape_2d", mixed, heads * width, count))

    def _rotated(self, name: str, norm: str, x: Tensor, heads: int, inputs: LayerInputs) -> Tensor:
        """Return heads [head_dim, heads, T] of q or k after the norm, if there is one, and RoPE."""
        graph, config = self._graph, self._config
        product = self._product(name, x)
        cut = graph.op("reshape_3d", product, config.head_dim, heads, self._count)
        if config.qk_norm_eps is not None:
            normed = graph.op("rms_norm", cut, config.qk_norm_eps)
            cut = graph.op("mul", normed, self._weights.tensors[self._at + norm])
        mode = ROPE_PAIRS if config.rope_interleaved else ROPE_HALVES
        size = float(rope_frequencies(config.layer(0).rope)[1])
        base = (config.rope_theta, 1.0, 0.0, size, 0.0, 0.0)
        return graph.op(
            "rope_ext", cut, inputs.positions, inputs.factors, config.head_dim, mode, 0, *base
        )

    def _cached(self, cache: Tensor, new: Tensor, inputs: LayerInputs, kind: TensorType) -> Tensor:
        """Store new keys or values; return all cells [head_dim, cells, n_kv_heads]."""
        graph, config = self._graph, self._config
        # Must be emitted first: attention reads the cache itself, not the result of set_rows, so no
        # dependency orders the two.
        graph.emit(graph.op("set_rows", cache, new, inputs.own_cells))
        head = kind.row_nbytes(config.head_dim)
        cell = head * config.n_kv_heads
        sizes = (config.head_dim, inputs.cells, config.n_kv_heads)
        return graph.op("view_3d", cache, *sizes, cell, head, 0)

    def _ffn(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Return W_down (SiLU(gate) * up), with gate and up as FFN_TERMS defines them."""
        kind = self._config.ffn_kind(self._number)
        sums: dict[str, Tensor] = {}
        for name, terms in FFN_TERMS[kind].items():
            parts = [self._product(name, x)] if "matrix" in terms else []
            parts += [self._row(inputs)] if "row" in terms else []
            sums[name] = parts[0] if len(parts) == 1 else self._graph.op("add", *parts)
        product = self._graph.op("swiglu_split", sums["gate"], sums["up"])
        return self._product("down", product)

    def _row(self, inputs: LayerInputs) -> Tensor:
        """Return the tokens' rows [d_ff, T] from the slots of the row cache."""
        row = self._graph.op("get_rows", self._slots[0], inputs.slot_ids)
        return self._product("project", row) if self._config.row_rank else row

    def _expert(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Return the output of the expert in each token's row; its gate and up lines alternate."""
        graph, config, count = self._graph, self._config, self._count
        ids = graph.op("reshape_2d", inputs.slot_ids, 1, count)
        inner, outer = self._slots
        both = graph.op("mul_mat_id", inner, graph.op("reshape_3d", x, config.dim, 1, count), ids)
        pairs = graph.op("reshape_3d", both, 2, config.d_ff, count)
        step, token = 2 * ggml_types.F32.nbytes, 2 * config.d_ff * ggml_types.F32.nbytes
        split = []
        for start in (0, ggml_types.F32.nbytes):
            view = graph.op("view_3d", pairs, 1, config.d_ff, count, step, token, start)
            split.append(graph.op("reshape_3d", graph.op("cont", view), config.d_ff, 1, count))
        product = graph.op("swiglu_split", *split)
        result = graph.op("mul_mat_id", outer, product, ids)
        return graph.op("reshape_2d", result, config.dim, count)

    def _product(self, name: str, x: Tensor) -> Tensor:
        """Return a matrix of this layer times x [K, T], plus its bias."""
        matrix = self._weights.product(self._at + name, self._count)
        product = self._graph.op("mul_mat", matrix, x)
        bias = self._weights.tensors.get(f"{self._at}{name}.bias")
        return product if bias is None else self._graph.op("add", product, bias)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(self._graph, x, self._weights.tensors[self._at + name], self._config)

    def _after(self, name: str, x: Tensor) -> Tensor:
        return self._norm(name, x) if self._config.post_norms else x


def rms_norm(graph: Graph, x: Tensor, weight: Tensor, config: ModelConfig) -> Tensor:
    """Return the RMS norm of x [dim, T], scaled by `weight`."""
    return graph.op("mul", graph.op("rms_norm", x, config.norm_eps), weight)


def emit_head(graph: Graph, config: ModelConfig, weights: Weights, x: Tensor, count: int) -> Tensor:
    """Return logits [V, count] of the last layer's hidden states x [dim, count]."""
    normed = rms_norm(graph, x, weights.tensors["norm"], config)
    logits = graph.op("mul_mat", weights.product("head", count), normed)
    if "head" in config.biases:
        logits = graph.op("add", logits, weights.tensors["head.bias"])
    if config.logit_softcap:
        part = graph.op("tanh", graph.op("scale", logits, 1 / config.logit_softcap))
        logits = graph.op("scale", part, config.logit_softcap)
    return logits
