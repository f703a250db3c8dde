"""Build the backbone's graphs: the embedding, the layers in their order, and the head.

| file | emits |
|---|---|
| layer.py | what all parts of a layer share: products, biases, norms |
| attention.py, ffn.py | the two parts of a layer |
| ple.py | per-layer embeddings after them |
| linear.py | matrix products, in float32 or quantized |
| device.py, portable.py | variants of these graphs for accelerators |
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.attention import attention
from stem_edge.graph.ffn import ffn
from stem_edge.graph.formats import BackboneFormat
from stem_edge.graph.ir import Graph
from stem_edge.graph.layer import NORM, LayerGraph, norm, plain_norm
from stem_edge.graph.linear import DecodeProducts, Products, PromptProducts, vector
from stem_edge.graph.ple import contexts, ple
from stem_edge.graph.weight_plan import WeightPlan
from stem_edge.tables.rows import RecordLayout

BACKBONE_DATA = "backbone.onnx.data"
PREFILL_DATA = "prefill.data"


class Built(NamedTuple):
    """Graphs by name, and the plan of the weight file that they share."""

    graphs: dict[str, Graph]
    plan: WeightPlan


def decoding(
    config: ModelConfig,
    layout: RecordLayout | None,
    format: BackboneFormat,
    *,
    positions: str = io.POSITIONS,
) -> Built:
    """Build the graphs that decode. Raises GraphError.

    positions: empty for layers with a window that keep the whole context nevertheless.
    """
    plan, graphs = WeightPlan(BACKBONE_DATA), {}
    for name in io.decode_graphs(config):
        graph = graphs[name] = Graph()
        products = DecodeProducts(graph, plan, format)
        if name == io.EMBED:
            _declare_output(graph, config, _embedding(products, config, io.NEW + io.HIDDEN))
            continue
        graph.input(io.HIDDEN, np.float32, [1, "T", config.dim])
        if name == io.HEAD:
            _head(products, config, _wanted(graph, io.HIDDEN), "n")
        elif name == io.REST:
            _rest(products, config, layout, positions)
        else:
            layers, start = io.layer_graphs(config)[name], Start(positions=positions)
            _declare_output(graph, config, _layers(products, config, layout, layers, start))
    return Built(graphs, plan)


def whole(config: ModelConfig, layout: RecordLayout | None, format: BackboneFormat) -> Graph:
    """Build one graph from token ids to logits, over the weight file of `decoding`.

    It is made for other tools: every value has a shape, rows are float inputs row.<l> [1, T, row
    width], and ONNX's default domain has none of the operators that onnxruntime alone adds to it.
    Experts are inputs in slots, as at runtime.
    """
    graph = Graph()
    products = DecodeProducts(graph, WeightPlan(BACKBONE_DATA), format)
    _embedding(products, config, io.HIDDEN)
    start = Start(positions="")
    x = _layers(products, config, layout, range(config.own_kv_layers), start)
    if rest := io.layer_graphs(config).get(io.REST):
        start = start._replace(hidden=x)
        x = _layers(products, config, layout, rest, start, f"{io.REST}.{io.HIDDEN}")
    _head(products, config, x, "T")
    nodes, graph.nodes = graph.nodes, []
    rows: dict[str, str] = {}  # value gathered from slots -> the input that replaces it
    for node in nodes:
        source = node.inputs[0] if node.inputs else ""
        node.inputs = [rows.get(name, name) for name in node.inputs]
        if node.op == NORM:
            x, weight = node.inputs
            plain_norm(graph, x, weight, node.outputs[0], node.real("epsilon"))
        elif layout is not None and source.startswith(io.ROW_CODES) and io.SLOT_IDS in node.inputs:
            name = io.row_name(int(source.removeprefix(io.ROW_CODES)))
            rows[node.outputs[0]] = graph.input(name, np.float32, [1, "T", layout.row_width])
        elif source in rows and node.op == "Cast":
            rows[node.outputs[0]] = rows[source]
        else:
            graph.nodes.append(node)
    used = {name for node in graph.nodes for name in node.inputs}
    graph.inputs = {name: value for name, value in graph.inputs.items() if name in used}
    return graph


def prompts(config: ModelConfig, layout: RecordLayout | None, format: BackboneFormat) -> Built:
    """Build the graph for prompts, of the layers before `rest`, over a weight file of its own."""
    graph, plan = Graph(), WeightPlan(PREFILL_DATA)
    graph.input(io.HIDDEN, np.float32, [1, "T", config.dim])
    products = PromptProducts(graph, plan, format)
    layers = range(config.own_kv_layers)
    _declare_output(graph, config, _layers(products, config, layout, layers, Start()))
    return Built({io.PREFILL: graph}, plan)


def _embedding(products: DecodeProducts, config: ModelConfig, result: str) -> str:
    """Emit token_ids [1, T] -> result [1, T, dim]."""
    ids = products.graph.input(io.TOKEN_IDS, np.int64, [1, "T"])
    graph, shape = products.graph, (config.vocab_size, config.dim)
    if config.embedding_scale == 1:
        return products.rows("embedding", "embedding", ids, result, shape)
    rows = products.rows("embedding", "embedding", ids, "embedding.row", shape)
    return graph.add("Mul", [rows, graph.float(config.embedding_scale)], result)


def _head(products: Products, config: ModelConfig, x: str, tokens: str) -> str:
    """Emit x [1, tokens, dim] -> logits [1, tokens, V]."""
    graph, plan, rows = products.graph, products.plan, config.vocab_size
    graph.output(io.LOGITS, np.float32, [1, tokens, rows])
    weight = vector(graph, plan, "norm", config.dim, ("norm",))
    normed = norm(graph, x, weight, config.norm_eps)
    bias, cap = "head" in config.biases, config.logit_softcap
    # The last of product, bias and cap must be named logits, because a graph's outputs go by name.
    logits = products.product(
        "head" if bias or cap else io.LOGITS,
        "head",
        normed,
        ("embedding" if config.tied_head else "head",),
        (rows, config.dim),
    )
    if bias:
        constant = vector(graph, plan, "head.bias", rows, ("head.bias",))
        logits = graph.add("Add", [logits, constant], "head.biased" if cap else io.LOGITS)
    if cap:
        constant = graph.constant("softcap", np.array(cap, np.float32))
        part = graph.add(
            "Tanh", [graph.add("Div", [logits, constant], "softcap.part")], "softcap.tanh"
        )
        logits = graph.add("Mul", [part, constant], io.LOGITS)
    return logits


def _wanted(graph: Graph, x: str) -> str:
    """Emit those positions of x [1, T, ...] whose logits are wanted."""
    graph.input(io.WANTED, np.int64, ["n"])
    return graph.add("Gather", [x, io.WANTED], f"wanted.{x}", axis=1)


def _rest(
    products: Products, config: ModelConfig, layout: RecordLayout | None, positions: str
) -> None:
    """Emit the layers that borrow K and V: hidden [1, T, dim] -> new_hidden [1, n, dim]."""
    graph, layers = products.graph, io.layer_graphs(config)[io.REST]
    start = Start(_wanted(graph, io.HIDDEN), positions="")
    if positions and any(map(config.window, layers)):
        start = start._replace(positions=_wanted(graph, positions))
    if config.ple_width:
        graph.input(io.EMBEDDED, np.float32, [1, "T", config.dim])
        graph.input(io.SLOT_IDS, np.int64, [1, "T"])
        embedded, slot_ids = _wanted(graph, io.EMBEDDED), _wanted(graph, io.SLOT_IDS)
        start = start._replace(embedded=embedded, slot_ids=slot_ids)
    _declare_output(graph, config, _layers(products, config, layout, layers, start), "n")


class Start(NamedTuple):
    """Names of the values that layers start from."""

    hidden: str = io.HIDDEN  # [1, T, dim]
    embedded: str = io.HIDDEN  # [1, T, dim], before the first layer of the model
    slot_ids: str = io.SLOT_IDS  # [1, T]
    positions: str = io.POSITIONS  # [1, T]; empty if the KV cache holds the whole context


def _layers(
    products: Products,
    config: ModelConfig,
    layout: RecordLayout | None,
    layers: range,
    start: Start,
    result: str = io.NEW + io.HIDDEN,
) -> str:
    """Emit start.hidden [1, T, dim] -> result [1, T, dim]."""
    graph, context = products.graph, dict[int, str]()
    _declare_layers(graph, config, layout, layers, start.positions)
    if config.ple_width:
        context = contexts(products, config, start.embedded, layers)
    residual, delta = start.hidden, ""
    for number in layers:
        layer = LayerGraph(config, layout, products, number, start.slot_ids, start.positions)
        x, residual = layer.add_norm("attention_norm", residual, delta, "qkv")
        delta = layer.post_norm("attention_post_norm", attention(layer, x))
        consumer = "gate" if layer.has_ffn_matrices else ""
        x, residual = layer.add_norm("ffn_norm", residual, delta, consumer)
        delta = layer.post_norm("ffn_post_norm", ffn(layer, x))
        if number in context:
            residual = graph.add("Add", [residual, delta], layer.at + "ffn.sum")
            delta = ple(layer, residual, context[number])
        if config.layer_scale:
            residual, delta = layer.scaled(residual, delta), ""
    if not delta:
        return graph.add("Identity", [residual], result)
    return graph.add("Add", [residual, delta], result)


def _declare_layers(
    graph: Graph, config: ModelConfig, layout: RecordLayout | None, layers: range, positions: str
) -> None:
    windows = {bool(positions and config.window(layer)) for layer in layers}
    for prefix in [io.WINDOW if window else "" for window in sorted(windows)]:
        graph.input(prefix + io.SEQLENS_K, np.int32, [1])
        graph.input(prefix + io.TOTAL_LENGTH, np.int32, [])
    if True in windows:
        graph.input(io.POSITIONS, np.int64, [1, "T"])
    for layer in map(config.layer, layers):
        for name in io.rope_names(config, layer):
            graph.input(name, np.float32, ["context", io.head_width(layer) // 2])
    stem = set(layers) & set(config.stem_layers)
    if stem:
        graph.input(io.SLOT_IDS, np.int64, [1, "T"])
    if stem and layout and layout.quantized and config.stem_ffn != "hash-moe":
        graph.input(io.ROW_ZERO_POINTS, np.uint8, None)


def _declare_output(graph: Graph, config: ModelConfig, name: str, tokens: str = "T") -> None:
    graph.output(name, np.float32, [1, tokens, config.dim])
