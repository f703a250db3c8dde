"""Graphs of a backbone with further outputs: what flows between their operators, as numbers.

Nothing is exported for that. A graph is a serialized protobuf message, and such messages merge when
they are concatenated: bytes that name further outputs, after the file's own, add them to its graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from stem_edge import graph_io as io
from stem_edge.bundle import Bundle
from stem_edge.errors import BackendError
from stem_edge.quantize import F32
from stem_edge.rope import rope_tables
from stem_edge.runtime.engines import check_installed
from stem_edge.runtime.machine import return_freed_memory, usable_cpus
from stem_edge.runtime.ort_session import new_session
from stem_edge.runtime.providers import CPU
from stem_edge.tables import Tables

# Numbers of fields in onnx.proto, and how protobuf marks one whose bytes have a length.
MODEL_GRAPH, GRAPH_OUTPUT, VALUE_NAME = 7, 12, 1
LENGTH_DELIMITED = 2
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
Feeds = dict[str, npt.NDArray[Any]]


def further_outputs(names: Sequence[str]) -> bytes:
    """What makes these values of a serialized model's graph outputs when it is appended."""
    outputs = b"".join(_field(GRAPH_OUTPUT, _field(VALUE_NAME, n.encode())) for n in names)
    return _field(MODEL_GRAPH, outputs)


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | LENGTH_DELIMITED) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; the eighth says that more follow."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


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


def _open(bundle: Bundle, graph: str, outputs: list[str], threads: int) -> ort.InferenceSession:
    path = bundle.file(io.graph_file(graph))
    weights = {WEIGHTS_FOLDER: str(bundle.path.absolute())}
    try:
        data = path.read_bytes() + further_outputs(outputs)
        return new_session(data, threads, [CPU], weights)
    except Exception as error:  # onnxruntime's classes share no base
        raise BackendError(
            f"{path}: onnxruntime {ort.__version__} cannot load this graph, or show "
            f"{', '.join(outputs)} in it ({str(error).splitlines()[0]}); run stem-edge verify, or "
            "export again"
        ) from error
