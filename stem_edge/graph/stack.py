"""Emits a graph's layers one after another, and declares the inputs that they share."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.attention import attention
from stem_edge.graph.ffn import ffn
from stem_edge.graph.ir import Graph
from stem_edge.graph.layer import LayerGraph
from stem_edge.graph.linear import Products
from stem_edge.graph.weight_plan import KvFormat
from stem_edge.layers import FFN_TERMS
from stem_edge.tables.rows import RecordLayout


class Start(NamedTuple):
    """Names of the graph values that a sequence of layers takes as input."""

    hidden: str = io.HIDDEN  # [B, T, hidden_width]
    embedded: str = io.HIDDEN  # [B, T, hidden_width], before the first layer of the model
    slot_ids: str = io.SLOT_IDS  # [B, T]
    positions: str = io.POSITIONS  # [B, T]; empty if the KV cache holds the whole context


def layers_in_order(
    products: Products,
    config: ModelConfig,
    layout: RecordLayout | None,
    cache: KvFormat,
    layers: range,
    start: Start,
    result: str = io.NEW + io.HIDDEN,
) -> str:
    """Emit `layers` in order: start.hidden [B, T, hidden_width] -> `result`, of the same shape."""
    graph, context, inputs = products.graph, dict[int, str](), (start.slot_ids, start.positions)
    _declare_layers(graph, config, layout, layers, start.positions)
    if config.ple_width:
        from stem_edge.graph.special.ple import contexts, ple  # only for models with them

        embedded = start.embedded
        if config.streams > 1:  # the first stream is the token's embedding
            embedded = graph.cut(embedded, 0, config.dim, 1, f"layers.{layers[0]}.embedded")
        context = contexts(products, config, embedded, layers)
    if config.streams > 1:
        sizes = [0, 0, config.streams, config.dim]
        streams = graph.reshape(start.hidden, sizes, f"layers.{layers[0]}.streams")
        for number in layers:
            layer = LayerGraph(config, layout, products, number, cache, *inputs)
            streams = _around(layer, streams, context.get(number, ""))
        return graph.reshape(streams, [0, 0, config.hidden_width], result)
    residual, delta = start.hidden, ""
    for number in layers:
        layer = LayerGraph(config, layout, products, number, cache, *inputs)
        if layer.kind == "ngrams":
            from stem_edge.graph.special.ngrams import with_ngrams  # only for such models

            residual = with_ngrams(layer, residual)
        elif layer.kind == "engram":
            from stem_edge.graph.special.engram import with_engram

            if delta:
                residual, delta = graph.add("Add", [residual, delta], layer.at + "before"), ""
            residual = with_engram(layer, residual)
        residual, delta = _layer(layer, residual, delta)
        if number in context:
            residual = graph.add("Add", [residual, delta], layer.at + "ffn.sum")
            delta = ple(layer, residual, context[number])
        if config.layer_scale:
            residual, delta = layer.scaled(residual, delta), ""
    if not delta:
        return graph.add("Identity", [residual], result)
    return graph.add("Add", [residual, delta], result)


def _layer(layer: LayerGraph, residual: str, delta: str) -> tuple[str, str]:
    """Emit a layer with the input residual + delta [B, T, dim]; return two values that add up to its result."""
    config = layer.config
    # A norm that LAuReL or a router reads, too, must not be divided by one product's SmoothQuant factors.
    x, residual = layer.add_norm(
        "attention_norm", residual, delta, "" if config.laurel_rank else "qkv"
    )
    delta = layer.post_norm("attention_post_norm", _attention(layer, x))
    if config.laurel_rank:
        from stem_edge.graph.special.altup import laurel

        residual, delta = laurel(layer, x, residual, delta), ""
    multiplies = any("matrix" in terms for terms in FFN_TERMS[layer.kind].values())
    alone = multiplies and not (config.row_experts and layer.number in config.stem_layers)
    x, residual = layer.add_norm("ffn_norm", residual, delta, "gate" if alone else "")
    return residual, layer.post_norm("ffn_post_norm", _ffn(layer, x))


def _attention(layer: LayerGraph, x: str) -> str:
    if not layer.kv.widened:
        return attention(layer, x)
    from stem_edge.graph.special.prompt_attention import widened_attention  # for prompts over int8

    return widened_attention(layer, x)


def _ffn(layer: LayerGraph, x: str) -> str:
    if layer.kind != "hash-moe":
        return ffn(layer, x)
    from stem_edge.graph.special.experts import experts  # only for such models

    return experts(layer, x)


def _around(layer: LayerGraph, streams: str, context: str) -> str:
    """Emit a layer with AltUp: [B, T, streams, dim] -> same shape. context: for `ple`, or ""."""
    from stem_edge.graph.special.altup import AltUp

    altup = AltUp(layer, streams)
    both = _layer(layer, altup.active, "")
    return altup.corrected(layer.graph.add("Add", both, layer.at + "computed"), context)


def _declare_layers(
    graph: Graph, config: ModelConfig, layout: RecordLayout | None, layers: range, positions: str
) -> None:
    windows = {bool(positions and config.window(layer)) for layer in layers}
    for prefix in [io.WINDOW if window else "" for window in sorted(windows)]:
        graph.input(prefix + io.SEQLENS_K, np.int32, [graph.sequences])
        graph.input(prefix + io.TOTAL_LENGTH, np.int32, [])
    if True in windows:
        graph.input(io.POSITIONS, np.int64, [graph.sequences, "T"])
    for layer in map(config.layer, layers):
        for name in io.rope_names(config, layer):
            graph.input(name, np.float32, ["context", io.head_width(layer) // 2])
    stem = set(layers) & set(config.stem_layers)
    if stem:
        rows = "R" if config.row_window else "T"
        each = [config.lookups] if config.ngram_order else []
        graph.input(io.SLOT_IDS, np.int64, [graph.sequences, rows, *each])
        if config.row_window:
            graph.input(io.ROW_SHARES, np.float32, [graph.sequences, "T+1", rows])
    if stem and layout and layout.quantized and config.stem_ffn != "hash-moe":
        graph.input(io.ROW_ZERO_POINTS, np.uint8, None)
