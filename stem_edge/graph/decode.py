"""Builds the backbone's graphs: the embedding, the layers in their order, and the head."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.formats import BACKBONE_DATA, BackboneFormat
from stem_edge.graph.ir import Graph
from stem_edge.graph.kv import KvType
from stem_edge.graph.layer import norm, wanted
from stem_edge.graph.linear import Products
from stem_edge.graph.stack import Start, layers_in_order
from stem_edge.graph.weight_plan import WeightPlan, place_peaks
from stem_edge.tables.rows import RecordLayout


class Built(NamedTuple):
    graphs: dict[str, Graph]
    plan: WeightPlan


def decoding(
    config: ModelConfig,
    layout: RecordLayout | None,
    format: BackboneFormat,
    *,
    kv: KvType = "fp32",
    unblocked: bool = False,
) -> Built:
    """Build decoding graphs and weight layout. unblocked: see KvFormat. Raises GraphError if `format` or `kv` is unfit."""
    plan, graphs = WeightPlan(BACKBONE_DATA), {}
    cache = place_peaks(plan, config, format, kv)._replace(unblocked=unblocked)
    begin = Start()
    # The head's graph places a matrix that embedding and head share, so the embedding comes after it.
    names = sorted(io.decode_graphs(config), key=lambda n: format.tied and n == io.EMBED)
    for name in names:
        graph = graphs[name] = Graph(sequences="B")
        products = products_of(config, graph, plan, format)
        if name == io.EMBED:
            declare_output(graph, config, embedding(products, config, io.NEW + io.HIDDEN))
            continue
        graph.input(io.HIDDEN, np.float32, [graph.sequences, "T", config.hidden_width])
        if name == io.HEAD:
            head(products, config, wanted(graph, io.HIDDEN), "n")
        elif name == io.REST:
            from stem_edge.graph.rest import rest  # only for models that borrow K and V

            result = rest(products, config, layout, begin._replace(embedded=io.EMBEDDED), cache)
            declare_output(graph, config, result, "n")
        else:
            layers = io.layer_graphs(config)[name]
            result = layers_in_order(products, config, layout, cache, layers, begin)
            declare_output(graph, config, result)
    return Built({name: graphs[name] for name in io.decode_graphs(config)}, plan)


def products_of(
    config: ModelConfig, graph: Graph, plan: WeightPlan, format: BackboneFormat
) -> Products:
    if not config.ranges:
        return Products(graph, plan, format)
    from stem_edge.graph.special.steps import SteppedProducts  # only for models with ranges

    return SteppedProducts(graph, plan, format, config)


def embedding(products: Products, config: ModelConfig, result: str) -> str:
    """Emit the input embedding: token_ids [B, T] -> `result` [B, T, hidden_width]."""
    graph, shape = products.graph, (config.vocab_size, config.dim)
    ids = graph.input(io.TOKEN_IDS, np.int64, [graph.sequences, "T"])
    many = config.streams > 1
    scaled = "embedding.scaled" if many else result
    factor = config.embedding_scale
    row = scaled if factor == 1 else "embedding.row"
    if products.format.split:
        from stem_edge.graph.special.best_logits import split_rows  # only for large heads

        x = split_rows(products, ids, row)
    else:
        x = products.rows(ids, row, shape)
    if factor != 1:
        x = graph.add("Mul", [x, graph.float(factor)], scaled)
    if not many:
        return x
    from stem_edge.graph.special.altup import expanded  # only for models with several streams

    return expanded(products, config, x, result)


def head(products: Products, config: ModelConfig, x: str, tokens: str) -> str:
    """Emit the last norm and logits [B, n, V] of x [B, n, hidden_width]. tokens: name of axis n."""
    graph, rows = products.graph, config.vocab_size
    if config.streams > 1:
        from stem_edge.graph.special.altup import merged

        x = merged(products, config, x)
    graph.output(io.LOGITS, np.float32, [graph.sequences, tokens, rows])
    weight = products.vector("norm", config.dim)
    normed = norm(graph, x, weight, config.norm_eps)
    bias, cap = "head" in config.biases, config.logit_softcap
    best = products.format.split
    # The last of product, best logits, bias and cap must be named logits, the name of the graph's output.
    logits = products.product(
        "head" if best or bias or cap else io.LOGITS,
        "head",
        normed,
        ("embedding" if config.tied_head else "head",),
        (rows, config.dim),
    )
    if best:
        from stem_edge.graph.special.best_logits import best_again  # only for large heads

        logits = best_again(products, config, normed, logits, "head.best" if cap else io.LOGITS)
    if bias:
        constant = products.vector("head.bias", rows)
        logits = graph.add("Add", [logits, constant], "head.biased" if cap else io.LOGITS)
    if cap:
        constant = graph.constant("softcap", np.array(cap, np.float32))
        part = graph.add(
            "Tanh", [graph.add("Div", [logits, constant], "softcap.part")], "softcap.tanh"
        )
        logits = graph.add("Mul", [part, constant], io.LOGITS)
    return logits


def declare_output(graph: Graph, config: ModelConfig, name: str, tokens: str = "T") -> None:
    graph.output(name, np.float32, [graph.sequences, tokens, config.hidden_width])
