"""The backbone on onnxruntime: a session for each graph, which contexts and batches share.

Hidden states, KV cache, rows and logits lie where the graphs compute: in the memory of a device, or
of this process. A step takes ids, slots and lengths, a few bytes a token, and returns the logits of
the tokens asked for, or from a device only the largest of them. On the CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort

from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError
from stem_edge.graph import names as io
from stem_edge.graph.kv import CACHES, KvType
from stem_edge.graph.names import Variant
from stem_edge.runtime.backends.interface import BackendBatch, BackendContext
from stem_edge.runtime.backends.onnxruntime.batch import OrtBatch
from stem_edge.runtime.backends.onnxruntime.context import OrtContext
from stem_edge.runtime.backends.onnxruntime.device_batch import DeviceBatch
from stem_edge.runtime.backends.onnxruntime.device_memory import DeviceMemory
from stem_edge.runtime.backends.onnxruntime.device_slots import DeviceSlots
from stem_edge.runtime.backends.onnxruntime.portable_backend import PortableContext
from stem_edge.runtime.backends.onnxruntime.providers.graphs import GraphSource
from stem_edge.runtime.backends.onnxruntime.providers.provider import CPU, Provider
from stem_edge.runtime.backends.onnxruntime.providers.session import open_session
from stem_edge.runtime.backends.onnxruntime.rope_arrays import RopeArrays
from stem_edge.runtime.backends.plain_batch import PlainBatch
from stem_edge.runtime.rows.slots import ArraySlots, Slots
from stem_edge.system.memory import keep_little_freed, return_freed_memory


class OrtBackend:
    """Sessions by the names of their graphs: those for the CPU, or a variant of them.

    memory: of the provider, for all but the weights. kv: type of keys and values in the graphs;
    default: that of the activations. Raises BackendError, OutOfMemoryError.
    """

    def __init__(
        self,
        config: ModelConfig,
        graphs: Mapping[str, Path | GraphSource],
        slots: Slots | None,
        threads: int,
        providers: Sequence[Provider],
        memory: DeviceMemory | None = None,
        variant: Variant | None = None,
        kv: KvType | None = None,
    ) -> None:
        if slots is not None and not isinstance(slots, (ArraySlots, DeviceSlots)):
            raise BackendError(
                "onnxruntime cannot read these slots; make them with this loader's make_slots"
            )
        self.config, self.slots, self.variant = config, slots, variant
        self.dtype = np.dtype(np.float16 if variant == "fp16" else np.float32)  # of activations
        self.kv = CACHES[kv or ("fp16" if variant == "fp16" else "fp32")]
        self.memory = memory or DeviceMemory(CPU)
        self.on_cpu = all(provider.on_cpu for provider in providers)
        self.batches = variant != "portable"  # whether sequences of a device decode together
        self._ropes: RopeArrays | None = None
        self.sessions: dict[str, ort.InferenceSession] = {}
        keep_little_freed()
        for name, graph in graphs.items():
            if name != io.ROWS:  # belongs to the slots, which run it
                self.sessions[name] = open_session(graph, threads, providers)
                return_freed_memory()  # otherwise what packing freed stays with this process

    def open_context(self, length: int) -> BackendContext:
        """Return an empty context for up to `length` tokens, with all memory that it will need.

        Raises OutOfMemoryError.
        """
        if self.variant == "portable" and not isinstance(self.slots, DeviceSlots):
            return PortableContext(self.config, self.sessions, self.slots, length)
        self.memory.collect()
        return OrtContext(self, length)

    def open_batch(self, size: int, length: int) -> BackendBatch:
        """Return an empty batch; portable graphs, and devices that fail a trial, take one at a time.

        Raises OutOfMemoryError.
        """
        if self.variant is None:
            return OrtBatch(self, size, length)
        return DeviceBatch(self, size, length) if self.batches else PlainBatch()

    @property
    def windowed(self) -> bool:
        """Whether layers with a window keep only that: the graphs for the CPU do."""
        return self.variant is None

    def ropes(self, length: int) -> RopeArrays:
        """Return the rotations for a context; another one's if they suffice, else longer ones."""
        if self._ropes is None or self._ropes.length < length:
            self._ropes = RopeArrays(self.config, self.memory, self.dtype, length)
        return self._ropes

    def close(self) -> None:
        """Release the sessions, and slots on a device."""
        self._ropes = None
        self.sessions.clear()
        if isinstance(self.slots, DeviceSlots):
            self.slots.close()
        self.memory.collect()
        return_freed_memory()
