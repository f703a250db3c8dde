"""Emits the graph `rest`: the last layers, which borrow K and V, for tokens that need logits."""

from __future__ import annotations

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.ir import Graph, Node
from stem_edge.graph.layer import wanted
from stem_edge.graph.linear import Products
from stem_edge.graph.stack import Start, layers_in_order
from stem_edge.graph.weight_plan import KvFormat
from stem_edge.tables.rows import RecordLayout

NEW_KEYS, NEW_VALUES = io.NEW + io.KEYS, io.NEW + io.VALUES


def rest(
    products: Products,
    config: ModelConfig,
    layout: RecordLayout | None,
    start: Start,
    cache: KvFormat,
) -> str:
    """Emit the last layers, which reuse K and V of others, only for the n tokens that need logits."""
    graph, layers = products.graph, io.layer_graphs(config)[io.REST]
    start = wanted_start(graph, config, layers, start)
    result = layers_in_order(products, config, layout, cache, layers, start)
    if config.ple_width:
        graph.input(io.EMBEDDED, np.float32, [graph.sequences, "T", config.hidden_width])
        graph.input(io.SLOT_IDS, np.int64, [graph.sequences, "T"])
    return result


def wanted_start(graph: Graph, config: ModelConfig, layers: range, start: Start) -> Start:
    """From each value [B, T, ...] that `start` names, select the n tokens that need logits."""
    if config.ple_width:
        start = start._replace(slot_ids=wanted(graph, start.slot_ids))
    positions = start.positions if any(map(config.window, layers)) else ""
    start = start._replace(
        hidden=wanted(graph, start.hidden),
        positions=wanted(graph, positions) if positions else "",
    )
    if config.ple_width:
        start = start._replace(embedded=wanted(graph, start.embedded))
    return start


def updated_caches(node: Node) -> dict[str, str]:
    """Return cache name -> output name, for each cache that an attention node updates."""
    caches = [name for name in node.outputs if name.startswith((NEW_KEYS, NEW_VALUES))]
    return {name.removeprefix(io.NEW): name for name in caches}
