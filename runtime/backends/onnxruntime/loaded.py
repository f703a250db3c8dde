"""A loaded backbone: its graphs as sessions, and what contexts and batches share beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError
from stem_edge.graph import names as io
from stem_edge.graph.kv import Cache
from stem_edge.runtime.backends.onnxruntime.memory import DeviceMemory
from stem_edge.runtime.backends.onnxruntime.providers.graphs import GraphSource
from stem_edge.runtime.backends.onnxruntime.providers.provider import Provider
from stem_edge.runtime.backends.onnxruntime.providers.session import open_session
from stem_edge.runtime.backends.onnxruntime.rope_arrays import Ropes
from stem_edge.runtime.rows.slots import ArraySlots, Slots
from stem_edge.system.memory import give_back_freed_blocks, return_freed_memory

CANNOT_READ = "onnxruntime cannot read these slots; make them with this loader's make_slots"


@dataclass(frozen=True)
class Loaded:
    """What contexts and batches of a backbone run over, and share."""

    config: ModelConfig
    sessions: dict[str, ort.InferenceSession]  # by the names of their graphs
    slots: Mapping[
        str, ort.OrtValue
    ]  # of the row cache, by the inputs of the graphs; empty if dense
    memory: DeviceMemory  # of the provider, for all but the weights
    kv: Cache  # of keys and values
    dtype: np.dtype[Any]  # of activations
    on_cpu: bool  # whether the provider reads host memory in place
    windowed: bool  # whether layers with a window keep only that: the graphs for the CPU do
    ropes: Ropes

    def close(self) -> None:
        """Release the sessions, and what contexts share."""
        self.ropes.clear()
        self.sessions.clear()
        self.memory.collect()
        return_freed_memory()


def open_sessions(
    graphs: Mapping[str, Path | GraphSource], threads: int, providers: Sequence[Provider]
) -> dict[str, ort.InferenceSession]:
    """Open the graphs of a backbone. Raises BackendError, OutOfMemoryError."""
    give_back_freed_blocks()
    sessions: dict[str, ort.InferenceSession] = {}
    for name, graph in graphs.items():
        if name != io.ROWS:  # belongs to the slots, which run it
            sessions[name] = open_session(graph, threads, providers)
            return_freed_memory()  # otherwise what packing freed stays with this process
    return sessions


def slots_in_arrays(slots: Slots | None) -> dict[str, ort.OrtValue]:
    """Return slots in this process's memory as inputs of graphs. Raises BackendError for others."""
    if slots is None:
        return {}
    if not isinstance(slots, ArraySlots):
        raise BackendError(CANNOT_READ)
    return {name: ort.OrtValue.ortvalue_from_numpy(rows) for name, rows in slots.inputs().items()}
