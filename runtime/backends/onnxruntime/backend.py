"""The backbone on onnxruntime's CPU.

Hidden states, KV cache, rows and logits lie where the graphs compute, so nothing is copied. A step takes
ids, slots and lengths, a few bytes a token, and returns the logits of the tokens asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.graph.kv import CACHES, KvType
from stem_edge.runtime.backends.interface import BackendBatch, BackendContext
from stem_edge.runtime.backends.onnxruntime.context import OrtContext
from stem_edge.runtime.backends.onnxruntime.loaded import (
    LaterSessions,
    Loaded,
    Ropes,
    open_sessions,
    slots_in_arrays,
)
from stem_edge.runtime.backends.onnxruntime.memory import DeviceMemory
from stem_edge.runtime.backends.onnxruntime.providers.graphs import GraphSource
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU
from stem_edge.runtime.rows.slots import Slots


class OrtBackend:
    """The graphs for the CPU, by their names. Raises BackendError, OutOfMemoryError.

    kv: type of keys and values in the graphs. later: further graphs, opened when one is first needed.
    """

    def __init__(
        self,
        config: ModelConfig,
        graphs: Mapping[str, Path | GraphSource],
        slots: Slots | None,
        threads: int,
        kv: KvType = "fp32",
        later: Mapping[str, Path | GraphSource] | None = None,
    ) -> None:
        memory, dtype = DeviceMemory(CPU), np.dtype(np.float32)
        self.loaded = Loaded(
            config,
            slots=slots_in_arrays(slots),
            sessions=open_sessions(graphs, threads, [CPU], whole_steps=bool(config.ranges)),
            memory=memory,
            kv=CACHES[kv],
            dtype=dtype,
            on_cpu=True,
            windowed=True,
            ropes=Ropes(config, memory, dtype),
            later=LaterSessions(later or {}, threads, whole_steps=bool(config.ranges)),
        )

    def open_context(self, length: int) -> BackendContext:
        """Return an empty context for up to `length` tokens, with all memory that it will need.

        Raises OutOfMemoryError.
        """
        return OrtContext(self.loaded, length)

    def open_batch(self, size: int, length: int) -> BackendBatch:
        """Return an empty batch. Raises OutOfMemoryError."""
        from stem_edge.runtime.backends.onnxruntime.batch import OrtBatch  # for several sequences

        return OrtBatch(self.loaded, size, length)

    def close(self) -> None:
        """Release the sessions."""
        self.loaded.close()
