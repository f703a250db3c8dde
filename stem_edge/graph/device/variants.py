"""Graphs for accelerators: which of them a model can have, and how they are built.

Besides the graphs that decode, three without weights serve a device's memory: one writes rows into
slots, one copies keys and values of sequences, and one picks the largest logits of a step.
stem_edge.graph.names lists inputs and outputs.
"""

from __future__ import annotations

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.attention import NOTHING
from stem_edge.graph.decode import decoding
from stem_edge.graph.device import adapting, portable
from stem_edge.graph.device.lending import lend
from stem_edge.graph.device.rows import DeviceRows
from stem_edge.graph.formats import BackboneFormat
from stem_edge.graph.ir import Graph
from stem_edge.graph.names import Variant
from stem_edge.tables.rows import RecordLayout


def obstacle(
    variant: Variant, config: ModelConfig, layout: RecordLayout | None, format: BackboneFormat
) -> str:
    """Return why a model cannot have graphs of a variant; empty if it can."""
    if variant == "portable":
        return portable.obstacle(config, layout, format)
    return adapting.obstacle(config, layout, format)


def graphs(
    variant: Variant, config: ModelConfig, layout: RecordLayout | None, format: BackboneFormat
) -> dict[str, Graph]:
    """Build all graphs of a variant that has no `obstacle`, by name."""
    sequences = 1 if variant == "portable" else "B"
    plain = decoding(config, layout, format, device=True, sequences=sequences).graphs
    for graph in plain.values():  # no layer adds keys and values of no tokens here
        graph.nodes = [node for node in graph.nodes if not node.outputs[0].startswith(NOTHING)]
    if variant == "portable":
        return {n: portable.lower(n, graph, config, layout) for n, graph in plain.items()}
    lend(plain, config)
    made = {n: adapting.derive(graph, layout, variant) for n, graph in plain.items()}
    if layout is not None:
        made[io.ROWS] = rows_graph(DeviceRows(layout, variant))
    return made | {io.TOP: top_graph(config), io.COPY: copy_graph()}


def rows_graph(rows: DeviceRows) -> Graph:
    """Build the graph that writes records [n, words] into slots [n, 1] of every slab."""
    graph = Graph()
    graph.input(io.RECORDS, np.int32, ["n", rows.words])
    graph.input(io.SLOTS, np.int64, ["n", 1])
    sizes = graph.sizes([slab.words for slab in rows.slabs])
    parts = [f"{io.RECORDS}.{slab.name}" for slab in rows.slabs]
    graph.node("Split", [io.RECORDS, sizes], parts, axis=1)
    for slab, part in zip(rows.slabs, parts, strict=True):
        shape: list[int | str] = ["slots", slab.words]
        name = graph.input(slab.name, np.int32, shape)
        new = graph.output(io.NEW + name, np.int32, shape)
        graph.add("ScatterND", [name, io.SLOTS, part], new)
    return graph


def top_graph(config: ModelConfig) -> Graph:
    """Build the graph that picks the `count` largest logits, in descending order, and their ids."""
    graph = Graph()
    graph.input(io.LOGITS, np.float32, ["B", "n", config.vocab_size])
    graph.input(io.COUNT, np.int64, [1])
    outputs = [
        graph.output(io.TOP_LOGITS, np.float32, ["B", "n", "count"]),
        graph.output(io.TOP_IDS, np.int64, ["B", "n", "count"]),
    ]
    graph.node("TopK", [io.LOGITS, io.COUNT], outputs)
    return graph


def copy_graph() -> Graph:
    """Build the graph that copies lines [k, words], `from` [n], into places [m, words], `to` [n, 1]."""
    graph = Graph()
    graph.input(io.LINES, np.int32, ["k", "words"])
    graph.input(io.FROM, np.int64, ["n"])
    graph.input(io.PLACES, np.int32, ["m", "words"])
    graph.input(io.TO, np.int64, ["n", 1])
    new = graph.output(io.NEW + io.PLACES, np.int32, ["m", "words"])
    chosen = graph.add("Gather", [io.LINES, io.FROM], "chosen")
    graph.add("ScatterND", [io.PLACES, io.TO, chosen], new)
    return graph
