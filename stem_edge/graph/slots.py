"""Graphs that serve a device's memory: rows into slots, and the greatest logits of a step.

stem_edge.graph.names has their inputs and outputs; they have no weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.device_rows import DeviceRows, Slab
from stem_edge.graph.ir import Graph


def rows_graph(rows: DeviceRows) -> Graph:
    """records [n, words] and slots [n, 1] -> every slab [slots, words] with these in place."""
    graph = Graph()
    graph.input(io.RECORDS, np.int32, ["n", rows.words])
    graph.input(io.SLOTS, np.int64, ["n", 1])
    _cut_records(graph, rows.slabs)
    for slab in rows.slabs:
        shape: list[int | str] = ["slots", slab.words]
        name = graph.input(slab.name, np.int32, shape)
        new = graph.output(io.NEW + name, np.int32, shape)
        graph.add("ScatterND", [name, io.SLOTS, _part(slab)], new)
    return graph


def top_graph(config: ModelConfig) -> Graph:
    """logits [1, n, V] and count [1] -> top_logits and top_ids [1, n, count], the greatest first."""
    graph = Graph()
    graph.input(io.LOGITS, np.float32, [1, "n", config.vocab_size])
    graph.input(io.COUNT, np.int64, [1])
    outputs = [
        graph.output(io.TOP_LOGITS, np.float32, [1, "n", "count"]),
        graph.output(io.TOP_IDS, np.int64, [1, "n", "count"]),
    ]
    graph.node("TopK", [io.LOGITS, io.COUNT], outputs)
    return graph


def _part(slab: Slab) -> str:
    return f"{io.RECORDS}.{slab.name}"


def _cut_records(graph: Graph, slabs: Sequence[Slab]) -> None:
    """Cut records into what belongs to each slab."""
    sizes = graph.constant("words", np.array([slab.words for slab in slabs], np.int64))
    graph.node("Split", [io.RECORDS, sizes], [_part(slab) for slab in slabs], axis=1)
