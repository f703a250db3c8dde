"""The backbone as ONNX graphs: stem_edge.graph_io names them, stem_edge.reference has their maths.

Rows come out of the row cache, a graph input, by GatherBlockQuantized; attention is
GroupQueryAttention over a KV buffer that is input and output at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stem_edge import graph_io as io
from stem_edge.bundle import WEIGHT_BITS, BackboneFormat
from stem_edge.config import ModelConfig
from stem_edge.export.checkpoint import check_finite
from stem_edge.export.graph import CONTRIB, Graph
from stem_edge.export.heads import HEAD_MATRICES, pad_heads
from stem_edge.export.linear import BlockLinear, FloatLinear, Linear, Weights, quantized
from stem_edge.quantize import zero_points
from stem_edge.reference import Matrix, whole
from stem_edge.rows import RecordLayout


@dataclass(frozen=True)
class Source:
    """What the graphs are made from."""

    config: ModelConfig
    layout: RecordLayout | None  # of the rows; a dense model has none
    matrices: Mapping[str, Matrix]


def make_linear(graph: Graph, weights: Weights, bits: int, block_size: int) -> Linear:
    """How a graph for decoding stores matrices of so many bits."""
    return (
        FloatLinear(graph, weights) if bits == 32 else BlockLinear(graph, weights, bits, block_size)
    )


def build_embed(graph: Graph, source: Source, weights: Weights, format: BackboneFormat) -> None:
    """token_ids [1, T] -> new_hidden [1, T, dim]."""
    config, bits = source.config, WEIGHT_BITS[format.head]
    graph.input(io.TOKEN_IDS, np.int64, [1, "T"])
    graph.output(io.NEW + io.HIDDEN, np.float32, [1, "T", config.dim])
    matrix, vocab = source.matrices["embedding"], config.vocab_size
    if bits == 32:
        pieces = weights.stream("embedding", [matrix], lambda values: values)
        data = graph.stream("embedding", np.float32, [vocab, config.dim], pieces)
        graph.node("Gather", [data, io.TOKEN_IDS], [io.NEW + io.HIDDEN])
        return
    codes, scales, block = quantized(
        weights, "embedding", "embedding", [matrix], bits, format.block_size
    )
    names = (
        graph.stream("embedding.codes", np.uint8, [vocab, config.dim * bits // 8], codes),
        graph.constant("embedding.scales", np.concatenate(scales)),
        graph.constant("embedding.zero_points", zero_points(vocab, config.dim // block, bits)),
    )
    _gather_blocks(graph, names, io.TOKEN_IDS, io.NEW + io.HIDDEN, bits, block)


def build_head(graph: Graph, source: Source, linear: Linear) -> None:
    """hidden [1, T, dim] -> logits [1, T, V]."""
    config = source.config
    x = graph.input(io.HIDDEN, np.float32, [1, "T", config.dim])
    graph.output(io.LOGITS, np.float32, [1, "T", config.vocab_size])
    normed = graph.node(
        "SimplifiedLayerNormalization",
        [x, graph.constant("norm", _vector(source, "norm"))],
        ["norm.out"],
        axis=-1,
        epsilon=config.norm_eps,
    )
    matrix = source.matrices["embedding" if config.tied_head else "head"]
    linear.product(io.LOGITS, "head", normed, [matrix])


class LayersBuilder:
    """Emits some layers, in the order in which data flows through them."""

    def __init__(self, graph: Graph, source: Source, linear: Linear) -> None:
        self.graph, self.source, self.linear = graph, source, linear
        self.config = source.config

    def build(self, layers: range) -> None:
        """hidden [1, T, dim] -> new_hidden [1, T, dim]."""
        self._declare(layers)
        residual, delta = io.HIDDEN, ""
        for layer in layers:
            at = f"layers.{layer}."
            heads = pad_heads(
                self.config, {name: self.source.matrices[at + name] for name in HEAD_MATRICES}
            )
            qkv = [heads[name] for name in ("wq", "wk", "wv")]
            x, residual = self._add_norm(at + "attention_norm", residual, delta, at + "qkv", qkv)
            delta = self._attention(layer, x, qkv, heads["wo"])
            names = ["gate"] if layer in self.config.stem_layers else ["gate", "up"]
            inner = [self.source.matrices[at + name] for name in names]
            x, residual = self._add_norm(at + "ffn_norm", residual, delta, at + "gate", inner)
            delta = self._ffn(layer, x, inner)
        self.graph.node("Add", [residual, delta], [io.NEW + io.HIDDEN])

    def _declare(self, layers: range) -> None:
        graph, config = self.graph, self.config
        graph.input(io.HIDDEN, np.float32, [1, "T", config.dim])
        graph.output(io.NEW + io.HIDDEN, np.float32, [1, "T", config.dim])
        graph.input(io.SEQLENS_K, np.int32, [1])
        graph.input(io.TOTAL_LENGTH, np.int32, [])
        for name in (io.ROPE_COS, io.ROPE_SIN):
            graph.input(name, np.float32, ["context", io.head_width(config) // 2])
        stem = set(layers) & set(config.stem_layers)
        if stem:
            graph.input(io.SLOT_IDS, np.int64, [1, "T"])
        if stem and self.source.layout and self.source.layout.quantized:
            graph.input(io.ROW_ZERO_POINTS, np.uint8, None)

    def _attention(self, layer: int, x: str, qkv: list[Matrix], wo: Matrix) -> str:
        """Attention of x [1, T, dim], its KV cache updated in place."""
        config, at = self.config, f"layers.{layer}."
        shape: list[int | str] = [1, config.n_kv_heads, "capacity", io.head_width(config)]
        caches = [name + str(layer) for name in (io.KEYS, io.VALUES)]
        for cache in caches:
            self.graph.input(cache, np.float32, shape)
            self.graph.output(io.NEW + cache, np.float32, shape)
        projected = self.linear.product(at + "qkv", "attention", x, qkv)
        mixed = self.graph.node(
            "GroupQueryAttention",
            [projected, "", "", *caches, io.SEQLENS_K, io.TOTAL_LENGTH, io.ROPE_COS, io.ROPE_SIN],
            [at + "attended", *(io.NEW + cache for cache in caches)],
            CONTRIB,
            num_heads=config.n_heads,
            kv_num_heads=config.n_kv_heads,
            do_rotary=1,
            rotary_interleaved=int(config.rope_interleaved),
            scale=config.head_dim**-0.5,  # the operator's own would be that of the padded width
        )
        return self.linear.product(at + "wo", "attention", mixed, [wo])

    def _ffn(self, layer: int, x: str, inner: list[Matrix]) -> str:
        """W_down (SiLU(W_gate x) * u): u is the token's row in a STEM layer, else W_up x."""
        at = f"layers.{layer}."
        gate = self.linear.product(at + "gate", "ffn", x, inner[:1])
        gate = self.graph.node("QuickGelu", [gate], [at + "silu"], CONTRIB, alpha=1.0)
        if layer in self.config.stem_layers:
            up = self._rows(layer)
        else:
            up = self.linear.product(at + "up", "ffn", x, inner[1:])
        product = self.graph.node("Mul", [gate, up], [at + "product"])
        down = self.source.matrices[at + "down"]
        return self.linear.product(at + "down", "ffn", product, [down])

    def _rows(self, layer: int) -> str:
        """Rows [1, T, d_ff] of the tokens, gathered from the slots of the row cache."""
        layout, name = self.source.layout, f"layers.{layer}.row"
        if layout is None:
            raise ValueError(f"layer {layer} is a STEM layer, but there is no layout of rows")
        # No shapes: shape inference of GatherBlockQuantized refuses a symbolic number of slots.
        codes = self.graph.input(f"{io.ROW_CODES}{layer}", layout.codes_dtype, None)
        if layout.quantized:
            scales = self.graph.input(f"{io.ROW_SCALES}{layer}", np.float32, None)
            names = (codes, scales, io.ROW_ZERO_POINTS)
            return _gather_blocks(
                self.graph, names, io.SLOT_IDS, name, layout.bits, layout.group_size
            )
        row = self.graph.node("Gather", [codes, io.SLOT_IDS], [name])
        return self.graph.node("Cast", [row], [name + ".fp32"], to=1) if layout.bits == 16 else row

    def _add_norm(
        self, name: str, residual: str, delta: str, consumer: str, matrices: list[Matrix]
    ) -> tuple[str, str]:
        """RMS norm of residual + delta, and that sum."""
        weight = self.linear.norm(name, _vector(self.source, name), consumer, matrices)
        constant, eps = self.graph.constant(name, weight), self.config.norm_eps
        if not delta:
            normed = self.graph.node(
                "SimplifiedLayerNormalization",
                [residual, constant],
                [name + ".out"],
                axis=-1,
                epsilon=eps,
            )
            return normed, residual
        total = name + ".sum"
        normed = self.graph.node(
            "SkipSimplifiedLayerNormalization",
            [residual, delta, constant],
            [name + ".out", "", "", total],
            CONTRIB,
            epsilon=eps,
        )
        return normed, total


def _vector(source: Source, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return check_finite(name, 0, whole(source.matrices[name]))


def _gather_blocks(
    graph: Graph, tensors: tuple[str, str, str], ids: str, name: str, bits: int, block: int
) -> str:
    codes, scales, zero_points = tensors
    return graph.node(
        "GatherBlockQuantized",
        # Zero points are explicit because kernels of different providers default differently.
        [codes, ids, scales, zero_points],
        [name],
        CONTRIB,
        bits=bits,
        block_size=block,
        gather_axis=0,
        quantize_axis=1,
    )
