"""A bundle's backend, slots and rows on an execution provider, assembled without the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from device_runs import exact_graphs
from installed import DEMO

from stem_edge.bundle.manifest import TABLES
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import Backend, BackendContext
from stem_edge.runtime.backends.onnxruntime.backend import OrtBackend
from stem_edge.runtime.backends.onnxruntime.device.backend import DeviceBackend
from stem_edge.runtime.backends.onnxruntime.device.loader import DeviceLoader
from stem_edge.runtime.backends.onnxruntime.providers.graphs import cpu_graphs
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU, Provider
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.rows.cache import RowCache
from stem_edge.runtime.rows.rows import Rows
from stem_edge.runtime.rows.slots import ArraySlots, Slots
from stem_edge.runtime.rows.store import open_store
from stem_edge.runtime.rows.table_rows import TableRows

IDS = np.random.default_rng(0).integers(0, 1500, 60)  # token ids of the demo
BUNDLE = open_bundle(DEMO)


class Parts(NamedTuple):
    backend: DeviceBackend
    slots: Slots | None
    rows: Rows


@contextlib.contextmanager
def on_device(
    bundle: Bundle = BUNDLE,
    provider: Provider = CPU,
    *,
    slots: int = 64,
    limit: int | None = None,
    overlap: bool = False,
) -> Iterator[Parts]:
    """Open a bundle on a device, with an empty row cache. limit: bytes of arrays there."""
    loader = DeviceLoader(bundle, LoadOptions(threads=1), provider)
    layout = bundle.manifest.tables
    storage = None if layout is None else loader.make_slots(layout, slots)
    backend = loader.open(storage)
    backend.memory.limit = limit
    rows = rows_over(bundle, storage, overlap=overlap)
    try:
        yield Parts(backend, storage, rows)
    finally:
        rows.close()
        backend.close()


@contextlib.contextmanager
def on_host(bundle: Bundle = BUNDLE, *, exact: bool = True) -> Iterator[tuple[OrtBackend, Rows]]:
    """Open the decode graphs on the CPU. exact: without rounding activations to int8."""
    config, layout = bundle.manifest.model, bundle.manifest.tables
    graphs = exact_graphs(bundle) if exact else cpu_graphs(bundle, prefill=False)
    storage = None if layout is None else ArraySlots(layout, 256)
    backend = OrtBackend(config, graphs, storage, 1)
    rows = rows_over(bundle, storage)
    try:
        yield backend, rows
    finally:
        rows.close()
        backend.close()


def rows_over(bundle: Bundle, slots: Slots | None, *, overlap: bool = False) -> Rows:
    """Return what fetches rows into slots, if there are any."""
    if slots is None or bundle.manifest.table_format is None:
        return Rows()
    store = open_store(bundle.file(TABLES), bundle.manifest.table_format)
    return TableRows(store, RowCache(slots), overlap=overlap)


def step(
    backend: Backend, context: BackendContext, rows: Rows, ids: Any, position: int, logits: int = 1
) -> F32:
    """Run a step and return a copy of its logits."""
    tokens = np.asarray(ids, np.int64)
    backend.begin([context], tokens[None], [position])
    return backend.finish(rows.slots(tokens), logits).copy()


def all_logits(
    backend: Backend,
    rows: Rows,
    sizes: Sequence[int],
    ids: np.ndarray = IDS,
    context: BackendContext | None = None,
) -> F32:
    """Logits of the first ids, in steps of these sizes."""
    context = context or backend.open_context(max(len(ids), sum(sizes)))
    found, position = [], 0
    for size in sizes:
        found.append(step(backend, context, rows, ids[position : position + size], position, size))
        position += size
    return np.concatenate(found)
