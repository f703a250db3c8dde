"""The demo model's parts on an execution provider, put together by hand."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from conftest import DEMO

from stem_edge.bundle import Bundle, open_bundle
from stem_edge.graph import names as io
from stem_edge.graph.device_rows import Activations, DeviceRows
from stem_edge.quantize import F32
from stem_edge.runtime.backend import BackendContext
from stem_edge.runtime.backend_device import DeviceBackend
from stem_edge.runtime.backend_ort import OrtBackend
from stem_edge.runtime.cache import RowCache
from stem_edge.runtime.device_memory import DeviceMemory
from stem_edge.runtime.device_slots import DeviceSlots
from stem_edge.runtime.ort_session import open_session
from stem_edge.runtime.prefetch import Prefetcher
from stem_edge.runtime.providers import CPU, Provider
from stem_edge.runtime.slots import ArraySlots
from stem_edge.runtime.store import open_store

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
    """Everything on a device, with an empty row cache."""
    bundle = open_bundle(DEMO)
    memory = DeviceMemory(provider, limit)
    files = variant_files(bundle, activations)
    session = open_session(files[io.ROWS], 1, [provider])
    layout = bundle.manifest.tables
    assert layout is not None
    storage = DeviceSlots(DeviceRows(layout, activations), slots, memory, session)
    config = bundle.manifest.model
    backend = DeviceBackend(config, files, storage, 1, [provider], memory, activations)
    rows = prefetcher(bundle, RowCache(storage), overlap)
    try:
        yield Parts(backend, storage, rows, memory)
    finally:
        rows.close()
        backend.close()


@contextlib.contextmanager
def on_host(folder: Path | None = None) -> Iterator[tuple[OrtBackend, Prefetcher]]:
    """The graphs that decode, on the CPU.

    folder: where they are written anew, with products that do not round activations to int8.
    """
    bundle = open_bundle(DEMO)
    config, layout = bundle.manifest.model, bundle.manifest.tables
    assert layout is not None
    files = {graph: bundle.file(io.graph_file(graph)) for graph in io.decode_graphs(config)}
    if folder is not None:
        shutil.copy(bundle.file("backbone.onnx.data"), folder)
        files = {graph: _exact(path, folder) for graph, path in files.items()}
    storage = ArraySlots(layout, 256)
    backend = OrtBackend(config, files, storage, 1, [CPU])
    rows = prefetcher(bundle, RowCache(storage), overlap=False)
    try:
        yield backend, rows
    finally:
        rows.close()
        backend.close()


def _exact(path: Path, folder: Path) -> Path:
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        for attribute in [one for one in node.attribute if one.name == "accuracy_level"]:
            node.attribute.remove(attribute)
    (folder / path.name).write_bytes(model.SerializeToString())
    return folder / path.name


def prefetcher(bundle: Bundle, cache: RowCache, overlap: bool) -> Prefetcher:
    assert bundle.manifest.table_format is not None
    store = open_store(bundle.file("tables.zarr"), bundle.manifest.table_format)
    return Prefetcher(store, cache, overlap=overlap)


def variant_files(bundle: Bundle, variant: io.Variant) -> dict[str, Path]:
    graphs = io.variant_graphs(bundle.manifest.model, variant)
    return {graph: bundle.file(io.graph_file(graph, variant)) for graph in graphs}


def step(
    context: BackendContext,
    rows: Prefetcher,
    ids: Sequence[int] | np.ndarray,
    position: int,
    logits: int = 1,
    top: int = 0,
) -> F32:
    """A copy of what one step gives."""
    tokens = np.asarray(ids, np.int64)
    context.begin(tokens, position)
    slots = rows.fetch(tokens)
    if top:
        return context.finish(slots, logits, top).copy()
    return context.finish(slots, logits).copy()


def all_logits(context: BackendContext, rows: Prefetcher, sizes: Sequence[int]) -> F32:
    """Of the first tokens of IDS, in steps of these sizes."""
    found, position = [], 0
    for size in sizes:
        found.append(step(context, rows, IDS[position : position + size], position, size))
        position += size
    return np.concatenate(found)
