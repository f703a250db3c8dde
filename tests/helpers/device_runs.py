"""Graphs of a bundle that round nothing, and inputs for a first step of its graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from stem_edge.bundle.opening import Bundle
from stem_edge.graph import names as io
from stem_edge.graph.decode import decoding
from stem_edge.graph.encoder import encode
from stem_edge.runtime.backends.onnxruntime.loaded import padded_ropes
from stem_edge.runtime.backends.onnxruntime.providers.graphs import format_of
from stem_edge.runtime.backends.onnxruntime.providers.session import GraphSource

Feeds = dict[str, Any]
Graphs = Mapping[str, GraphSource]
SPARE = 2  # unused positions of the KV cache


def exact_graphs(bundle: Bundle) -> dict[str, GraphSource]:
    """Build decode graphs that do not round activations to int8."""
    manifest = bundle.manifest
    made = decoding(manifest.model, manifest.tables, format_of(bundle)).graphs
    for graph in made.values():
        for node in graph.nodes:
            node.attributes.pop("accuracy_level", None)
    return {n: GraphSource(n, encode(graph), bundle.path) for n, graph in made.items()}


def inputs(bundle: Bundle, ids: list[int]) -> Feeds:
    """Make the inputs of the graphs for a first step with these tokens."""
    model, count = bundle.manifest.model, len(ids)
    feeds: Feeds = {
        io.TOKEN_IDS: np.array([ids], np.int64),
        io.SLOT_IDS: np.arange(count)[None],
        io.POSITIONS: np.arange(count)[None],
        io.WANTED: np.arange(count),
    }
    for prefix in ("", io.WINDOW):
        feeds[prefix + io.SEQLENS_K] = np.array([count - 1], np.int32)
        feeds[prefix + io.TOTAL_LENGTH] = np.array(count, np.int32)
    width, capacity = io.head_width(model.layer(0)), count + SPARE
    feeds |= padded_ropes(model, capacity)
    for layer in range(model.n_layers):
        shape = (1, model.n_kv_heads, capacity, width)
        feeds |= {f"{name}{layer}": np.zeros(shape, np.float32) for name in (io.KEYS, io.VALUES)}
    return feeds
