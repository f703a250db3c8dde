"""Build the backbone's graphs: the embedding, the layers in their order, and the head.

| file | emits |
|---|---|
| stack.py | the layers in their order |
| layer.py | what all parts of a layer share: products, biases, norms |
| attention.py, ffn.py | the two parts of a layer, and per-layer embeddings after them |
| special/ | of some models: several hidden states of a token, around each layer and at both ends |
| linear.py | matrix products, in float32 or quantized |
| device/ | these graphs in standard operators, for accelerators |
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.formats import BACKBONE_DATA, BackboneFormat
from stem_edge.graph.ir import Graph, Node
from stem_edge.graph.kv import KvFormat, KvType, place_peaks
from stem_edge.graph.layer import norm
from stem_edge.graph.linear import DecodeProducts, Products, vector
from stem_edge.graph.prompt_products import PromptProducts
from stem_edge.graph.stack import Start, layers_in_order
from stem_edge.graph.weight_plan import WeightPlan
from stem_edge.tables.rows import RecordLayout

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
    kv: KvType = "fp32",
) -> Built:
    """Build the graphs that decode. Raises GraphError."""
    plan, graphs = WeightPlan(BACKBONE_DATA), {}
    cache = place_peaks(plan, config, format, kv)
    begin = Start()
    # A matrix that is stored once lies where the head is, so the embedding comes after it.
    names = sorted(io.decode_graphs(config), key=lambda n: format.tied and n == io.EMBED)
    for name in names:
        graph = graphs[name] = Graph(sequences="B")
        products = products_of(config, graph, plan, format)
        if name == io.EMBED:
            _declare_output(graph, config, embedding(products, config, io.NEW + io.HIDDEN))
            continue
        graph.input(io.HIDDEN, np.float32, [graph.sequences, "T", config.hidden_width])
        if name == io.HEAD:
            head(products, config, _wanted(graph, io.HIDDEN), "n")
        elif name == io.REST:
            _rest(products, config, layout, begin._replace(embedded=io.EMBEDDED), cache)
        else:
            layers = io.layer_graphs(config)[name]
            _declare_output(
                graph, config, layers_in_order(products, config, layout, cache, layers, begin)
            )
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
        embedding(products_of(config, Graph(), plan, format), config, io.HIDDEN)  # takes its place
    products = products_of(config, graph, plan, format)
    x = graph.input(io.HIDDEN, np.float32, [graph.sequences, "T", config.hidden_width])
    parts = io.layer_graphs(config)
    for name, layers in parts.items():
        start = Start(x, io.HIDDEN)
        if name == io.REST:
            start = _wanted_start(graph, config, layers, start)
        x = layers_in_order(products, config, layout, cache, layers, start, f"{name}.{io.HIDDEN}")
    head(products, config, x if io.REST in parts else _wanted(graph, x), "n")
    updated: dict[str, str] = {}
    for node in graph.nodes:
        # Otherwise layers that borrow K and V could read them before they are there.
        node.inputs = [updated.get(name, name) for name in node.inputs]
        updated |= updated_caches(node)
    return graph


def products_of(
    config: ModelConfig, graph: Graph, plan: WeightPlan, format: BackboneFormat
) -> DecodeProducts:
    """Return what emits the products of a graph that decodes."""
    if not config.ranges:
        return DecodeProducts(graph, plan, format)
    from stem_edge.graph.special.steps import SteppedProducts  # for models with ranges alone

    return SteppedProducts(graph, plan, format, config)


def updated_caches(node: Node) -> dict[str, str]:
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
    _declare_output(
        graph, config, layers_in_order(products, config, layout, cache, layers, Start())
    )
    return Built({io.PREFILL: graph}, plan)


def embedding(products: DecodeProducts, config: ModelConfig, result: str) -> str:
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
    if not many:
        return x
    from stem_edge.graph.special.altup import expanded  # for models with several streams alone

    return expanded(products, config, x, result)


def head(products: Products, config: ModelConfig, x: str, tokens: str) -> str:
    """Emit x [B, tokens, hidden_width] -> logits [B, tokens, V]."""
    graph, plan, rows = products.graph, products.plan, config.vocab_size
    if config.streams > 1:
        from stem_edge.graph.special.altup import merged

        x = merged(products, config, x)
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
    """Emit the positions of x [B, T, ...] that need logits."""
    graph.input(io.WANTED, np.int64, ["n"])
    return graph.add("Gather", [x, io.WANTED], f"wanted.{x}", axis=1)


def _rest(
    products: Products,
    config: ModelConfig,
    layout: RecordLayout | None,
    start: Start,
    cache: KvFormat,
) -> None:
    """Emit the layers that borrow K and V: hidden [B, T, hidden_width] -> new_hidden [B, n, ...]."""
    graph, layers = products.graph, io.layer_graphs(config)[io.REST]
    wanted = _wanted_start(graph, config, layers, start)
    result = layers_in_order(products, config, layout, cache, layers, wanted)
    _declare_output(graph, config, result, "n")
    if config.ple_width:
        graph.input(io.EMBEDDED, np.float32, [graph.sequences, "T", config.hidden_width])
        graph.input(io.SLOT_IDS, np.int64, [graph.sequences, "T"])


def _wanted_start(graph: Graph, config: ModelConfig, layers: range, start: Start) -> Start:
    """Emit the wanted positions of the inputs of layers that borrow K and V."""
    if config.ple_width:
        start = start._replace(slot_ids=_wanted(graph, start.slot_ids))
    positions = start.positions if any(map(config.window, layers)) else ""
    start = start._replace(
        hidden=_wanted(graph, start.hidden),
        positions=_wanted(graph, positions) if positions else "",
    )
    if config.ple_width:
        start = start._replace(embedded=_wanted(graph, start.embedded))
    return start


def _declare_output(graph: Graph, config: ModelConfig, name: str, tokens: str = "T") -> None:
    graph.output(name, np.float32, [graph.sequences, tokens, config.hidden_width])
