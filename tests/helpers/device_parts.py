"""The demo's backend, slots and rows on an execution provider, assembled without the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from device_runs import exact_graphs
from installed import DEMO

from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.graph import names as io
from stem_edge.graph.device.rows import Activations, DeviceRows
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import BackendContext
from stem_edge.runtime.backends.onnxruntime.backend import OrtBackend
from stem_edge.runtime.backends.onnxruntime.device.backend import DeviceBackend
from stem_edge.runtime.backends.onnxruntime.device.loader import variant_graphs
from stem_edge.runtime.backends.onnxruntime.device.places import place_of
from stem_edge.runtime.backends.onnxruntime.device.slots import DeviceSlots
from stem_edge.runtime.backends.onnxruntime.memory import DeviceMemory
from stem_edge.runtime.backends.onnxruntime.providers.graphs import cpu_graphs
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU, Provider
from stem_edge.runtime.backends.onnxruntime.providers.session import open_session
from stem_edge.runtime.rows.cache import RowCache
from stem_edge.runtime.rows.prefetch import Prefetcher
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.runtime.rows.store import open_store

IDS = np.random.default_rng(0).integers(0, 1500, 60)  # token ids of the demo


class Parts(NamedTuple):
    backend: DeviceBackend
    slots: DeviceSlots
    rows: Prefetcher
    memory: DeviceMemory


@contextlib.contextmanager
def on_device(
    activations: Activations,
    provider: Provider = CPU,
    *,
    slots: int = 64,
    limit: int | None = None,
    overlap: bool = False,
) -> Iterator[Parts]:
    """Open the parts on a device, with an empty row cache."""
    bundle = open_bundle(DEMO)
    memory = DeviceMemory(provider, place_of(provider), limit)
    graphs = variant_graphs(bundle, activations)
    session = open_session(graphs[io.ROWS], 1, [provider])
    layout = bundle.manifest.tables
    assert layout is not None
    storage = DeviceSlots(DeviceRows(layout, activations), slots, memory, session)
    config = bundle.manifest.model
    backend = DeviceBackend(config, graphs, storage, 1, [provider], memory, activations)
    rows = prefetcher(bundle, RowCache(storage), overlap)
    try:
        yield Parts(backend, storage, rows, memory)
    finally:
        rows.close()
        backend.close()


@contextlib.contextmanager
def on_host(*, exact: bool = True) -> Iterator[tuple[OrtBackend, Prefetcher]]:
    """Open the decode graphs on the CPU.

    exact: without rounding activations to int8.
    """
    bundle = open_bundle(DEMO)
    config, layout = bundle.manifest.model, bundle.manifest.tables
    assert layout is not None
    graphs = exact_graphs(bundle) if exact else cpu_graphs(bundle, prefill=False)
    storage = ArraySlots(layout, 256)
    backend = OrtBackend(config, graphs, storage, 1)
    rows = prefetcher(bundle, RowCache(storage), overlap=False)
    try:
        yield backend, rows
    finally:
        rows.close()
        backend.close()


def prefetcher(bundle: Bundle, cache: RowCache, overlap: bool) -> Prefetcher:
    assert bundle.manifest.table_format is not None
    store = open_store(bundle.file("tables.zarr"), bundle.manifest.table_format)
    return Prefetcher(store, cache, overlap=overlap)


def step(
    context: BackendContext,
    rows: Prefetcher,
    ids: Sequence[int] | np.ndarray,
    position: int,
    logits: int = 1,
    top: int = 0,
) -> F32:
    """Run a step and return a copy of its logits."""
    tokens = np.asarray(ids, np.int64)
    context.begin(tokens, position)
    slots = rows.fetch(tokens)
    if top:
        return context.finish(slots, logits, top).copy()
    return context.finish(slots, logits).copy()


def all_logits(context: BackendContext, rows: Prefetcher, sizes: Sequence[int]) -> F32:
    """Logits of the first tokens of IDS, in steps of these sizes."""
    found, position = [], 0
    for size in sizes:
        found.append(step(context, rows, IDS[position : position + size], position, size))
        position += size
    return np.concatenate(found)
