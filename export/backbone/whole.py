"""Builds backbone.onnx: the whole backbone as one ONNX graph, for other tools.

The runtime runs the graphs embed, early, late, rest and head (graph.names) in sequence; this graph joins
them. Table rows of layer l are the input row.<l>, float32 [1, T, row width], not slots of a row cache.
The batch size is 1. All layers, also those with sliding-window attention, cache the whole context.
"""

from __future__ import annotations

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.decode import embedding, head, products_of
from stem_edge.graph.device.standard import plain_norm
from stem_edge.graph.formats import BACKBONE_DATA, BackboneFormat
from stem_edge.graph.ir import Graph
from stem_edge.graph.layer import NORM
from stem_edge.graph.rest import updated_caches
from stem_edge.graph.stack import Start, layers_in_order
from stem_edge.graph.weight_plan import WeightPlan, place_peaks
from stem_edge.tables.rows import RecordLayout

ROW = "row."  # prefix of inputs: the table rows of a layer


def whole(config: ModelConfig, layout: RecordLayout | None, format: BackboneFormat) -> Graph:
    """Build one ONNX graph from token ids to logits. It refers to the bundle's weight file for decoding.

    layout: of the table records; None for a dense model. Operators that onnxruntime adds to the default domain are
    not used, because other tools lack them. Experts' weights are inputs: arrays with one expert per cache slot.
    """
    graph, plan = Graph(), WeightPlan(BACKBONE_DATA)
    cache = place_peaks(plan, config, format)
    products = products_of(config, graph, plan, format)
    if not format.tied:
        embedding(products, config, io.HIDDEN)
    start = Start(positions="")
    x = layers_in_order(products, config, layout, cache, range(config.own_kv_layers), start)
    if rest := io.layer_graphs(config).get(io.REST):
        start = start._replace(hidden=x)
        x = layers_in_order(products, config, layout, cache, rest, start, f"{io.REST}.{io.HIDDEN}")
    head(products, config, x, "T")
    if format.tied:  # built after the head, whose weights it uses, but computed first
        later, graph.nodes = graph.nodes, []
        embedding(products, config, io.HIDDEN)
        graph.nodes += later
    _separate(graph, layout, config.lookups)
    used = {name for node in graph.nodes for name in node.inputs}
    graph.inputs = {name: value for name, value in graph.inputs.items() if name in used}
    return graph


def _separate(graph: Graph, layout: RecordLayout | None, rows_per_token: int) -> None:
    """Change a graph for other tools: table rows become inputs, norms become standard operators."""
    nodes, graph.nodes = graph.nodes, []
    # Value gathered from slots -> the input that replaces it; cache -> cache after its update.
    other: dict[str, str] = {}
    for node in nodes:
        source = node.inputs[0] if node.inputs else ""
        node.inputs = [other.get(name, name) for name in node.inputs]
        if node.op == NORM:
            x, weight = node.inputs
            plain_norm(graph, x, weight, node.outputs[0], node.attributes["epsilon"])
        elif layout is not None and source.startswith(io.ROW_CODES) and io.SLOT_IDS in node.inputs:
            name = ROW + source.removeprefix(io.ROW_CODES)
            width = layout.row_width * rows_per_token
            other[node.outputs[0]] = graph.input(name, np.float32, [1, "T", width])
        elif source in other and node.op == "Cast":
            other[node.outputs[0]] = other[source]
        else:
            graph.nodes.append(node)
            # Layers that use an earlier layer's K and V must read its cache after the update.
            other |= updated_caches(node)
