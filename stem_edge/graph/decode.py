"""Build the backbone's graphs: the embedding, the layers in their order, and the head.

| file | emits |
|---|---|
| layer.py | what all parts of a layer share: products, biases, norms |
| attention.py, ffn.py | the two parts of a layer |
| ple.py | per-layer embeddings after them |
| altup.py | several hidden states of a token, around each layer and at both ends |
| linear.py | matrix products, in float32 or quantized |
| device.py, portable.py | variants of these graphs for accelerators |
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.altup import AltUp, expanded, laurel, merged
from stem_edge.graph.attention import attention
from stem_edge.graph.ffn import ffn
from stem_edge.graph.formats import BackboneFormat
from stem_edge.graph.ir import Graph, Node
from stem_edge.graph.kv import KvFormat, KvType, place_peaks
from stem_edge.graph.layer import NORM, LayerGraph, norm, plain_norm
from stem_edge.graph.linear import DecodeProducts, Products, vector
from stem_edge.graph.ple import contexts, ple
from stem_edge.graph.prompt_products import PromptProducts
from stem_edge.graph.weight_plan import WeightPlan
from stem_edge.tables.rows import RecordLayout

BACKBONE_DATA = "backbone.onnx.data"
PREFILL_DATA = "prefill.data"
NEW_KEYS, NEW_VALUES = io.NEW + io.KEYS, io.NEW + io.VALUES


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
    kv: KvType = "fp32",
    sequences: int | str = "B",
) -> Built:
    """Build the graphs that decode. Raises GraphError.

    positions: empty for layers with a window that keep the whole context nevertheless.
    sequences: 1 for graphs that decode no batches.
    """
    plan, graphs = WeightPlan(BACKBONE_DATA), {}
    cache = place_peaks(plan, config, format, kv)
    # A matrix that is stored once lies where the head is, so the embedding comes after it.
    names = sorted(io.decode_graphs(config), key=lambda n: format.tied and n == io.EMBED)
    for name in names:
        graph = graphs[name] = Graph(sequences=sequences)
        products = DecodeProducts(graph, plan, format)
        if name == io.EMBED:
            _declare_output(graph, config, _embedding(products, config, io.NEW + io.HIDDEN))
            continue
        graph.input(io.HIDDEN, np.float32, [graph.sequences, "T", config.hidden_width])
        if name == io.HEAD:
            _head(products, config, _wanted(graph, io.HIDDEN), "n")
        elif name == io.REST:
            _rest(products, config, layout, positions, cache)
        else:
            layers, start = io.layer_graphs(config)[name], Start(positions=positions)
            _declare_output(graph, config, _layers(products, config, layout, cache, layers, start))
    return Built({name: graphs[name] for name in io.decode_graphs(config)}, plan)


def joined(
    config: ModelConfig,
    layout: RecordLayout | None,
    format: BackboneFormat,
    *,
    kv: KvType = "fp32",
) -> Graph:
    """Join the graphs of `decoding` after the embedding in one, over the same weight file.

    It computes the same bits as they do. One run wakes onnxruntime's threads once.
    """
    graph, plan = Graph(sequences="B"), WeightPlan(BACKBONE_DATA)
    cache = place_peaks(plan, config, format, kv)
    if not format.tied:
        _embedding(DecodeProducts(Graph(), plan, format), config, io.HIDDEN)  # takes its place
    products = DecodeProducts(graph, plan, format)
    x = graph.input(io.HIDDEN, np.float32, [graph.sequences, "T", config.hidden_width])
    parts = io.layer_graphs(config)
    for name, layers in parts.items():
        start = Start(x, io.HIDDEN)
        if name == io.REST:
            start = _wanted_start(graph, config, layers, start)
        x = _layers(products, config, layout, cache, layers, start, f"{name}.{io.HIDDEN}")
    _head(products, config, x if io.REST in parts else _wanted(graph, x), "n")
    updated: dict[str, str] = {}
    for node in graph.nodes:
        # Otherwise layers that borrow K and V could read them before they are there.
        node.inputs = [updated.get(name, name) for name in node.inputs]
        updated |= _updated(node)
    return graph


def whole(config: ModelConfig, layout: RecordLayout | None, format: BackboneFormat) -> Graph:
    """Build one graph from token ids to logits, over the weight file of `decoding`.

    It is made for other tools: every value has a shape, rows are float inputs row.<l> [1, T, row
    width], and ONNX's default domain has none of the operators that onnxruntime alone adds to it.
    Experts are inputs in slots, as at runtime.
    """
    graph, plan = Graph(), WeightPlan(BACKBONE_DATA)
    cache = place_peaks(plan, config, format)
    products = DecodeProducts(graph, plan, format)
    if not format.tied:
        _embedding(products, config, io.HIDDEN)
    start = Start(positions="")
    x = _layers(products, config, layout, cache, range(config.own_kv_layers), start)
    if rest := io.layer_graphs(config).get(io.REST):
        start = start._replace(hidden=x)
        x = _layers(products, config, layout, cache, rest, start, f"{io.REST}.{io.HIDDEN}")
    _head(products, config, x, "T")
    if format.tied:  # after the head, whose weights it takes, but computed first
        later, graph.nodes = graph.nodes, []
        _embedding(products, config, io.HIDDEN)
        graph.nodes += later
    _separate(graph, layout)
    used = {name for node in graph.nodes for name in node.inputs}
    graph.inputs = {name: value for name, value in graph.inputs.items() if name in used}
    return graph


def _separate(graph: Graph, layout: RecordLayout | None) -> None:
    """Make rows inputs instead of slots, caches values instead of memory, and norms plain."""
    nodes, graph.nodes = graph.nodes, []
    # Value gathered from slots -> the input that replaces it; cache -> itself after its update.
    other: dict[str, str] = {}
    for node in nodes:
        source = node.inputs[0] if node.inputs else ""
        node.inputs = [other.get(name, name) for name in node.inputs]
        if node.op == NORM:
            x, weight = node.inputs
            plain_norm(graph, x, weight, node.outputs[0], node.real("epsilon"))
        elif layout is not None and source.startswith(io.ROW_CODES) and io.SLOT_IDS in node.inputs:
            name = io.row_name(int(source.removeprefix(io.ROW_CODES)))
            other[node.outputs[0]] = graph.input(name, np.float32, [1, "T", layout.row_width])
        elif source in other and node.op == "Cast":
            other[node.outputs[0]] = other[source]
        else:
            graph.nodes.append(node)
            # For layers that borrow K and V: nothing binds both names to the same memory here.
            other |= _updated(node)


def _updated(node: Node) -> dict[str, str]:
    """Return the caches that a node updates -> their new names."""
    caches = [name for name in node.outputs if name.startswith((NEW_KEYS, NEW_VALUES))]
    return {name.removeprefix(io.NEW): name for name in caches}


def prompts(
    config: ModelConfig,
    layout: RecordLayout | None,
    format: BackboneFormat,
    *,
    kv: KvType = "fp32",
) -> Built:
    """Build the graph for prompts, of the layers before `rest`, over a weight file of its own."""
    graph, plan = Graph(), WeightPlan(PREFILL_DATA)
    graph.input(io.HIDDEN, np.float32, [graph.sequences, "T", config.hidden_width])
    products = PromptProducts(graph, plan, format)
    layers, cache = (
        range(config.own_kv_layers),
        place_peaks(WeightPlan(BACKBONE_DATA), config, format, kv),
    )
    _declare_output(graph, config, _layers(products, config, layout, cache, layers, Start()))
    return Built({io.PREFILL: graph}, plan)


def _embedding(products: DecodeProducts, config: ModelConfig, result: str) -> str:
    """Emit token_ids [B, T] -> result [B, T, hidden_width]."""
    graph, shape = products.graph, (config.vocab_size, config.dim)
    ids = graph.input(io.TOKEN_IDS, np.int64, [graph.sequences, "T"])
    many = config.streams > 1
    scaled = "embedding.scaled" if many else result
    if config.embedding_scale == 1:
        x = products.rows("embedding", "embedding", ids, scaled, shape)
    else:
        rows = products.rows("embedding", "embedding", ids, "embedding.row", shape)
        x = graph.add("Mul", [rows, graph.float(config.embedding_scale)], scaled)
    return expanded(products, config, x, result) if many else x


def _head(products: Products, config: ModelConfig, x: str, tokens: str) -> str:
    """Emit x [B, tokens, hidden_width] -> logits [B, tokens, V]."""
    graph, plan, rows = products.graph, products.plan, config.vocab_size
    x = merged(products, config, x) if config.streams > 1 else x
    graph.output(io.LOGITS, np.float32, [graph.sequences, tokens, rows])
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
    """Emit those positions of x [B, T, ...] whose logits are wanted."""
    graph.input(io.WANTED, np.int64, ["n"])
    return graph.add("Gather", [x, io.WANTED], f"wanted.{x}", axis=1)


def _rest(
    products: Products,
    config: ModelConfig,
    layout: RecordLayout | None,
    positions: str,
    cache: KvFormat,
) -> None:
    """Emit the layers that borrow K and V: hidden [B, T, hidden_width] -> new_hidden [B, n, ...]."""
    graph, layers = products.graph, io.layer_graphs(config)[io.REST]
    if config.ple_width:
        graph.input(io.EMBEDDED, np.float32, [graph.sequences, "T", config.hidden_width])
        graph.input(io.SLOT_IDS, np.int64, [graph.sequences, "T"])
    start = Start(embedded=io.EMBEDDED, positions=positions)
    start = _wanted_start(graph, config, layers, start)
    _declare_output(graph, config, _layers(products, config, layout, cache, layers, start), "n")


def _wanted_start(graph: Graph, config: ModelConfig, layers: range, start: Start) -> Start:
    """Emit the wanted positions of what layers without K and V of their own start from."""
    positions = start.positions if any(map(config.window, layers)) else ""
    start = start._replace(
        hidden=_wanted(graph, start.hidden),
        positions=_wanted(graph, positions) if positions else "",
    )
    if config.ple_width:
        embedded, slot_ids = _wanted(graph, start.embedded), _wanted(graph, start.slot_ids)
        start = start._replace(embedded=embedded, slot_ids=slot_ids)
    return start


class Start(NamedTuple):
    """Names of the values that layers start from."""

    hidden: str = io.HIDDEN  # [B, T, hidden_width]
    embedded: str = io.HIDDEN  # [B, T, hidden_width], before the first layer of the model
    slot_ids: str = io.SLOT_IDS  # [B, T]
    positions: str = io.POSITIONS  # [B, T]; empty if the KV cache holds the whole context


def _layers(
    products: Products,
    config: ModelConfig,
    layout: RecordLayout | None,
    cache: KvFormat,
    layers: range,
    start: Start,
    result: str = io.NEW + io.HIDDEN,
) -> str:
    """Emit start.hidden [B, T, hidden_width] -> result, of the same shape."""
    graph, context, inputs = products.graph, dict[int, str](), (start.slot_ids, start.positions)
    _declare_layers(graph, config, layout, layers, start.positions)
    if config.ple_width:
        embedded = start.embedded
        if config.streams > 1:  # the first stream is what all others were made of
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
    """Emit attention and FFN of residual + delta [B, T, dim]; return two values to be added."""
    config = layer.config
    # With a LAuReL the norm feeds two products, so no balance of one may divide it.
    x, residual = layer.add_norm(
        "attention_norm", residual, delta, "" if config.laurel_rank else "qkv"
    )
    delta = layer.post_norm("attention_post_norm", attention(layer, x))
    if config.laurel_rank:
        residual, delta = laurel(layer, x, residual, delta), ""
    x, residual = layer.add_norm(
        "ffn_norm", residual, delta, "gate" if layer.has_ffn_matrices else ""
    )
    return residual, layer.post_norm("ffn_post_norm", ffn(layer, x))


def _around(layer: LayerGraph, streams: str, context: str) -> str:
    """Emit a layer that computes one of the streams [B, T, streams, dim] -> the same shape."""
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
        graph.input(io.SLOT_IDS, np.int64, [graph.sequences, "T"])
    if stem and layout and layout.quantized and config.stem_ffn != "hash-moe":
        graph.input(io.ROW_ZERO_POINTS, np.uint8, None)


def _declare_output(graph: Graph, config: ModelConfig, name: str, tokens: str = "T") -> None:
    graph.output(name, np.float32, [graph.sequences, tokens, config.hidden_width])
