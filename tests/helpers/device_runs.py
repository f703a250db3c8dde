"""Run the graphs of a bundle, or a variant of them, for a single step on the CPU provider."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from stem_edge.bundle.manifest import TABLES
from stem_edge.bundle.opening import Bundle
from stem_edge.graph import names as io
from stem_edge.graph.decode import decoding
from stem_edge.graph.device.rows import Activations, DeviceRows
from stem_edge.graph.encoder import encode
from stem_edge.numerics.quantize import F32, U8
from stem_edge.runtime.backends.onnxruntime.loaded import padded_ropes
from stem_edge.runtime.backends.onnxruntime.providers.graphs import format_of
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU
from stem_edge.runtime.backends.onnxruntime.providers.session import GraphSource, new_session
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.runtime.rows.store import open_store

Feeds = dict[str, Any]
Graphs = Mapping[str, GraphSource]
SPARE = 2  # unused slots and positions of the KV cache


def run(graph: GraphSource, feeds: Feeds) -> Feeds:
    """Run a graph with those feeds that it has inputs for. Returns its outputs by name."""
    session = new_session(graph, 1, [CPU])
    names = [output.name for output in session.get_outputs()]
    found = session.run(names, {value.name: feeds[value.name] for value in session.get_inputs()})
    return dict(zip(names, found, strict=True))


def exact_graphs(bundle: Bundle) -> dict[str, GraphSource]:
    """Build decode graphs that do not round activations to int8."""
    manifest = bundle.manifest
    made = decoding(manifest.model, manifest.tables, format_of(bundle)).graphs
    for graph in made.values():
        for node in graph.nodes:
            node.attributes.pop("accuracy_level", None)
    return {n: GraphSource(n, encode(graph), bundle.path) for n, graph in made.items()}


def logits(
    bundle: Bundle, graphs: Graphs, ids: list[int], variant: Activations | None = None
) -> F32:
    """Logits [T, V] of the graphs, with all tokens in one step."""
    feeds = inputs(bundle, ids, graphs, variant)
    for graph in io.decode_graphs(bundle.manifest.model):
        found = run(graphs[graph], feeds)
        feeds[io.HIDDEN] = found.get(io.NEW + io.HIDDEN)
    result: F32 = found[io.LOGITS][0]
    return result


def inputs(
    bundle: Bundle,
    ids: list[int],
    graphs: Graphs | None = None,
    variant: Activations | None = None,
) -> Feeds:
    """Make the inputs of the graphs, or of a variant, for a first step with these tokens."""
    model, floats = bundle.manifest.model, np.float16 if variant == "fp16" else np.float32
    count = len(ids)
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
    feeds |= {name: table.astype(floats) for name, table in padded_ropes(model, capacity).items()}
    for layer in range(model.n_layers):
        shape = (1, model.n_kv_heads, capacity, width)
        feeds |= {f"{name}{layer}": np.zeros(shape, floats) for name in (io.KEYS, io.VALUES)}
    if bundle.manifest.tables is not None:
        feeds |= _slots(bundle, graphs or {}, ids, variant)
    return feeds


def _slots(bundle: Bundle, graphs: Graphs, ids: list[int], variant: Activations | None) -> Feeds:
    """Make slots with the rows of some tokens, in their order."""
    layout, format = bundle.manifest.tables, bundle.manifest.table_format
    assert layout is not None and format is not None
    with open_store(bundle.file(TABLES), format) as store:
        records = store.read(np.array(ids))
    if variant is not None:
        return device_slots(DeviceRows(layout, variant), graphs, records)
    slots = ArraySlots(layout, len(ids))
    slots.write(np.arange(len(ids)), records)
    return slots.inputs()


def device_slots(rows: DeviceRows, graphs: Graphs, records: U8) -> Feeds:
    """Run the rows graph over slots that hold other values, in a shuffled order."""
    order = np.random.default_rng(0).permutation(len(records))
    feeds: Feeds = {io.RECORDS: rows.pack(records)[order], io.SLOTS: order[:, None]}
    for slab in rows.slabs:
        feeds[slab.name] = np.full((len(records) + SPARE, slab.words), 0x7F7F7F7F, np.int32)
    made = run(graphs[io.ROWS], feeds)
    named: Feeds = {slab.name: made[io.NEW + slab.name].view(slab.dtype) for slab in rows.slabs}
    if rows.layout.quantized:
        named[io.ROW_ZERO_POINTS] = rows.zero_points(len(records) + SPARE)
    return named
