"""All layers and the head in one graph, for backbones that are saved with repacked weights."""

from __future__ import annotations

import numpy as np

from stem_edge.bundle.opening import Bundle
from stem_edge.graph import names as io
from stem_edge.graph.decode import embedding, head, products_of
from stem_edge.graph.formats import BACKBONE_DATA
from stem_edge.graph.ir import Graph
from stem_edge.graph.kv import KvType
from stem_edge.graph.layer import wanted
from stem_edge.graph.rest import updated_caches, wanted_start
from stem_edge.graph.stack import Start, layers_in_order
from stem_edge.graph.weight_plan import WeightPlan, place_peaks
from stem_edge.runtime.backends.onnxruntime.providers.graphs import (
    format_of,
    separate,
    unblocked_attention,
    with_states_of,
)


def joined_parts(bundle: Bundle, *, prefill: bool, kv: KvType = "fp32") -> dict[str, Graph]:
    """Return graph name -> graph: `step`, which has all layers and the head, and the other graphs.

    `step` replaces graphs that run one after the other (early, late, rest, head), with the same
    bits. With `prefill`, `rest` and `head` (graph/names.py) are returned, too, for a prompt's last
    step.
    """
    others = separate(bundle, prefill=prefill, kv=kv)
    for name in (io.EARLY, io.LATE, *(() if prefill else (io.REST, io.HEAD))):
        others.pop(name, None)
    return {io.STEP: with_states_of(bundle, _joined(bundle, kv))} | others


def _joined(bundle: Bundle, kv: KvType) -> Graph:
    """Build one graph of all layers and the head, over the same weight file as separate graphs.

    It computes the same bits, but wakes onnxruntime's threads only once per step.
    """
    config, layout, format = bundle.manifest.model, bundle.manifest.tables, format_of(bundle)
    graph, plan = Graph(sequences="B"), WeightPlan(BACKBONE_DATA)
    cache = place_peaks(plan, config, format, kv)
    cache = cache._replace(unblocked=unblocked_attention(bundle, kv))
    if not format.tied:
        embedding(products_of(config, Graph(), plan, format), config, io.HIDDEN)  # only its place
    products = products_of(config, graph, plan, format)
    x = graph.input(io.HIDDEN, np.float32, [graph.sequences, "T", config.hidden_width])
    parts = io.layer_graphs(config)
    for name, layers in parts.items():
        start = Start(x, io.HIDDEN)
        if name == io.REST:
            start = wanted_start(graph, config, layers, start)
        x = layers_in_order(products, config, layout, cache, layers, start, f"{name}.{io.HIDDEN}")
    head(products, config, x if io.REST in parts else wanted(graph, x), "n")
    updated: dict[str, str] = {}
    for node in graph.nodes:
        # Otherwise layers that borrow K and V could read them before they are computed.
        node.inputs = [updated.get(name, name) for name in node.inputs]
        updated |= updated_caches(node)
    return graph
