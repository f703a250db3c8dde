"""The backbone on an execution provider's device.

Everything lies in the device's memory; a step brings only the largest logits to the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError
from stem_edge.graph.device.rows import Activations
from stem_edge.graph.kv import CACHES
from stem_edge.runtime.backends.interface import BackendBatch, BackendContext
from stem_edge.runtime.backends.onnxruntime.context import OrtContext
from stem_edge.runtime.backends.onnxruntime.device.batch import DeviceBatch
from stem_edge.runtime.backends.onnxruntime.device.slots import DeviceSlots
from stem_edge.runtime.backends.onnxruntime.loaded import CANNOT_READ, Loaded, Ropes, open_sessions
from stem_edge.runtime.backends.onnxruntime.memory import DeviceMemory
from stem_edge.runtime.backends.onnxruntime.providers.graphs import GraphSource
from stem_edge.runtime.backends.onnxruntime.providers.provider import Provider
from stem_edge.runtime.backends.plain_batch import PlainBatch
from stem_edge.runtime.rows.slots import Slots


class DeviceBackend:
    """Graphs of a variant, by their names. Raises BackendError, OutOfMemoryError.

    memory: of the provider, for all but the weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        graphs: Mapping[str, Path | GraphSource],
        slots: Slots | None,
        threads: int,
        providers: Sequence[Provider],
        memory: DeviceMemory,
        variant: Activations,
    ) -> None:
        if slots is not None and not isinstance(slots, DeviceSlots):
            raise BackendError(CANNOT_READ)
        dtype = np.dtype(np.float16 if variant == "fp16" else np.float32)
        self._slots = slots
        self.batches = True  # whether sequences decode together
        self.loaded = Loaded(
            config,
            slots={} if slots is None else slots.inputs(),
            sessions=open_sessions(graphs, threads, providers),
            memory=memory,
            kv=CACHES[variant],
            dtype=dtype,
            on_cpu=all(provider.on_cpu for provider in providers),
            windowed=False,
            ropes=Ropes(config, memory, dtype),
        )

    def open_context(self, length: int) -> BackendContext:
        """Return an empty context, as OrtBackend does."""
        self.loaded.memory.collect()
        return OrtContext(self.loaded, length)

    def open_batch(self, size: int, length: int) -> BackendBatch:
        """Return an empty batch; on devices that fail a trial, it takes one sequence at a time."""
        return DeviceBatch(self.loaded, size, length) if self.batches else PlainBatch()

    def close(self) -> None:
        """Release the sessions and the slots."""
        if self._slots is not None:
            self._slots.close()
        self.loaded.close()
