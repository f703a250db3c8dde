"""The backbone as ONNX graphs: stem_edge.graph_io names them, stem_edge.reference has their maths.

| file | emits |
|---|---|
| backbone.py | the order of layers, the embedding before them and the head after |
| layer.py | what every part of a layer uses: products, biases, norms |
| attention.py, ffn.py | the two parts of a layer |
| linear.py | matrices, in the ways that onnxruntime multiplies with |
"""

from __future__ import annotations

import numpy as np

from stem_edge import graph_io as io
from stem_edge.export.attention import QKV, attention
from stem_edge.export.checkpoint import check_finite
from stem_edge.export.ffn import ffn
from stem_edge.export.graph import Graph
from stem_edge.export.layer import LayerGraph, Source
from stem_edge.export.linear import DecodeLinear, Linear
from stem_edge.quantize import F32
from stem_edge.reference import whole


def build_embed(graph: Graph, source: Source, linear: DecodeLinear) -> None:
    """token_ids [1, T] -> new_hidden [1, T, dim]."""
    graph.input(io.TOKEN_IDS, np.int64, [1, "T"])
    graph.output(io.NEW + io.HIDDEN, np.float32, [1, "T", source.config.dim])
    matrix = source.matrices["embedding"]
    linear.rows("embedding", "embedding", io.TOKEN_IDS, io.NEW + io.HIDDEN, matrix)


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
    bias, cap = "head" in config.biases, config.logit_softcap
    # Whichever comes last gives the logits their name.
    logits = linear.product("head" if bias or cap else io.LOGITS, "head", normed, [matrix])
    if bias:
        constant = graph.constant("head.bias", _vector(source, "head.bias"))
        logits = graph.node("Add", [logits, constant], ["head.biased" if cap else io.LOGITS])
    if cap:
        constant = graph.constant("softcap", np.array(cap, np.float32))
        part = graph.node("Div", [logits, constant], ["softcap.part"])
        part = graph.node("Tanh", [part], ["softcap.tanh"])
        graph.node("Mul", [part, constant], [io.LOGITS])


class LayersBuilder:
    """Emits some layers, in the order in which data flows through them."""

    def __init__(self, graph: Graph, source: Source, linear: Linear) -> None:
        self.graph, self.source, self.linear = graph, source, linear
        self.config = source.config

    def build(self, layers: range) -> None:
        """hidden [1, T, dim] -> new_hidden [1, T, dim]."""
        self._declare(layers)
        residual, delta = io.HIDDEN, ""
        for number in layers:
            layer = LayerGraph(self.graph, self.source, self.linear, number)
            x, residual = layer.add_norm("attention_norm", residual, delta, "qkv", QKV)
            delta = layer.post_norm("attention_post_norm", attention(layer, x))
            x, residual = layer.add_norm("ffn_norm", residual, delta, "gate", layer.ffn_inputs)
            delta = layer.post_norm("ffn_post_norm", ffn(layer, x))
        self.graph.node("Add", [residual, delta], [io.NEW + io.HIDDEN])

    def _declare(self, layers: range) -> None:
        graph, config, layout = self.graph, self.config, self.source.layout
        graph.input(io.HIDDEN, np.float32, [1, "T", config.dim])
        graph.output(io.NEW + io.HIDDEN, np.float32, [1, "T", config.dim])
        graph.input(io.SEQLENS_K, np.int32, [1])
        graph.input(io.TOTAL_LENGTH, np.int32, [])
        for name in (io.ROPE_COS, io.ROPE_SIN):
            graph.input(name, np.float32, ["context", io.head_width(config) // 2])
        stem = set(layers) & set(config.stem_layers)
        if stem:
            graph.input(io.SLOT_IDS, np.int64, [1, "T"])
        if stem and layout and layout.quantized and config.stem_ffn != "hash-moe":
            graph.input(io.ROW_ZERO_POINTS, np.uint8, None)


def _vector(source: Source, name: str) -> F32:
    return check_finite(name, 0, whole(source.matrices[name]))
