"""Graphs of a backbone with further outputs: what flows between their operators, as numbers."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from stem_edge.bundle import Bundle
from stem_edge.errors import BackendError
from stem_edge.graph import names as io
from stem_edge.graph.decode import decoding
from stem_edge.graph.encoder import encode
from stem_edge.quantize import F32
from stem_edge.rope import rope_tables
from stem_edge.runtime.engines import check_installed
from stem_edge.runtime.graphs import GraphSource, format_of
from stem_edge.runtime.machine import return_freed_memory, usable_cpus
from stem_edge.runtime.ort_session import open_session
from stem_edge.runtime.providers import CPU
from stem_edge.tables import Tables

Feeds = dict[str, npt.NDArray[Any]]


class TappedGraphs:
    """The graphs that decode, but for the head, each with further outputs; a context manager.

    outputs: graph -> names of values in it. Raises BackendError if a graph has no such value.
    """

    def __init__(self, bundle: Bundle, outputs: dict[str, list[str]], threads: int | None) -> None:
        check_installed(bundle, "onnxruntime")
        self._bundle, self._outputs = bundle, outputs
        self._sessions = {
            name: _open(bundle, name, outputs.get(name, []), threads or usable_cpus())
            for name in (io.EMBED, *io.layer_graphs(bundle.manifest.model))
        }

    def run(self, token_ids: npt.NDArray[np.int64], tables: Tables) -> dict[str, F32]:
        """Name -> values [T, width] at all positions of one context. Raises BackendError."""
        feeds = self._feeds(token_ids, tables)
        hidden, found = io.NEW + io.HIDDEN, dict[str, F32]()
        for name, session in self._sessions.items():
            wanted = [hidden, *self._outputs.get(name, [])]
            inputs = {each.name: feeds[each.name] for each in session.get_inputs()}
            try:
                values = session.run(wanted, inputs)
            except Exception as error:  # onnxruntime's classes share no base
                raise BackendError(
                    f"{self._bundle.path}: the backbone ({name}) failed: {error}"
                ) from error
            feeds[io.HIDDEN] = values[0]
            found |= {name: value[0] for name, value in zip(wanted[1:], values[1:], strict=True)}
        return found

    def _feeds(self, token_ids: npt.NDArray[np.int64], tables: Tables) -> Feeds:
        """The inputs of all graphs, from an empty context."""
        config, count = self._bundle.manifest.model, len(token_ids)
        width = io.head_width(config)
        padding = ((0, 0), (0, (width - config.head_dim) // 2))
        cos, sin = (np.pad(table, padding) for table in rope_tables(config, count))
        distinct, slots = np.unique(token_ids, return_inverse=True)
        feeds: Feeds = {
            io.TOKEN_IDS: token_ids[None],
            io.SLOT_IDS: slots.astype(np.int64).reshape(1, -1),
            io.SEQLENS_K: np.array([count - 1], np.int32),
            io.TOTAL_LENGTH: np.array(count, np.int32),
            io.ROPE_COS: cos,
            io.ROPE_SIN: sin,
        }
        empty = np.zeros((1, config.n_kv_heads, count, width), np.float32)
        for layer in range(config.n_layers):
            feeds |= {f"{io.KEYS}{layer}": empty, f"{io.VALUES}{layer}": empty}
        return feeds | _row_feeds(distinct, tables)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._sessions.clear()
        return_freed_memory()


def _row_feeds(token_ids: npt.NDArray[np.int64], tables: Tables) -> Feeds:
    """Rows of tokens as slots, one a token in this order."""
    layout, records = tables.layout, tables.records(token_ids)
    feeds: Feeds = {}
    for index, layer in enumerate(layout.layers):
        feeds[io.row_codes(layer)] = np.ascontiguousarray(layout.codes(records, index))
        if layout.quantized:
            scales = layout.scales(records, index)
            feeds[io.row_scales(layer)] = np.ascontiguousarray(scales, np.float32)
    if layout.quantized:
        feeds[io.ROW_ZERO_POINTS] = layout.zero_points(len(records))
    return feeds


def _open(bundle: Bundle, name: str, outputs: list[str], threads: int) -> ort.InferenceSession:
    manifest = bundle.manifest
    graph = decoding(manifest.model, manifest.tables, format_of(bundle)).graphs[name]
    for output in outputs:
        graph.output(output, np.float32, None)
    return open_session(GraphSource(name, encode(graph), bundle.path), threads, [CPU])
