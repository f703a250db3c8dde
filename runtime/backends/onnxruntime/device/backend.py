"""The backbone on an execution provider's device.

Everything lies in the device's memory; a step brings only the largest logits to the host. A batch takes
the arrays of all its places at once. A step binds the beginning of them, because a provider need not tell
where within its memory an array lies. For the same reason, a graph copies keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError
from stem_edge.graph import names as io
from stem_edge.graph.device.rows import Activations
from stem_edge.graph.kv import CACHES
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import BackendBatch, BackendContext
from stem_edge.runtime.backends.onnxruntime.bound_graphs import BoundGraphs
from stem_edge.runtime.backends.onnxruntime.context import KvArrays, OrtContext
from stem_edge.runtime.backends.onnxruntime.device.slots import DeviceSlots
from stem_edge.runtime.backends.onnxruntime.loaded import CANNOT_READ, Loaded, Ropes, open_sessions
from stem_edge.runtime.backends.onnxruntime.memory import DeviceArray, DeviceMemory
from stem_edge.runtime.backends.onnxruntime.providers.provider import Provider
from stem_edge.runtime.backends.onnxruntime.providers.session import (
    BoundSession,
    GraphSource,
    onnxruntime_errors,
)
from stem_edge.runtime.backends.plain_batch import PlainBatch
from stem_edge.runtime.rows.slots import Slots

WORD = 4  # bytes


class DeviceBatch(BackendBatch):
    """Places for `size` sequences of up to `length` tokens. Raises OutOfMemoryError."""

    copies = True

    def __init__(self, loaded: Loaded, size: int, length: int) -> None:
        self._memory, self._size = loaded.memory, size
        self._owned: list[object] = []
        self._memory.collect()
        self._kv = KvArrays(loaded, size, length)
        self._owned.append(self._kv)
        self._graphs = BoundGraphs(loaded, length)
        self._owned.append(self._graphs)
        self._session = BoundSession(loaded.sessions[io.COPY], in_place=loaded.on_cpu)
        self._owned.append(self._session)
        self.fixed_nbytes = self._kv.nbytes_of(length)
        self._lines: list[int] = []  # of the arrays, that have the sequences in places 0, 1, ...
        self._free: list[int] = []  # positions that the next tokens of these will take
        self._bound = self._skipped = 0  # sequences with bound arrays; not in this step

    def __del__(self) -> None:
        self._memory.retire(self._owned)  # not freed here: this may be any thread

    def join(self, context: BackendContext, tokens: int) -> None:
        place, wanted = len(self._lines), self._kv.length
        if not isinstance(context, OrtContext) or place == self._size or tokens > wanted:
            raise ValueError(
                f"{tokens} tokens of a {type(context).__name__} are to join {place} sequences; "
                f"expected up to {wanted} of an OrtContext, and {self._size} sequences"
            )
        if tokens and context.length != wanted:
            raise ValueError(f"the context has {context.length} tokens; expected {wanted}")
        self._close_gaps()
        if tokens:
            self._copy(context.kv, 0, place)
        self._lines.append(place)
        self._free.append(tokens)

    def leave(self, place: int) -> None:
        """Remove a sequence. Nothing is copied before the next step or join, where it may fail."""
        for numbers in (self._lines, self._free):
            last = numbers.pop()
            if place < len(numbers):
                numbers[place] = last

    def begin(
        self, first: int, token_ids: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> None:
        """Start a step as BackendBatch.begin does.

        Sequences before the first, which only a step after an error leaves out, compute a token that
        their next one replaces.
        """
        self._memory.collect()
        self._close_gaps()
        count, self._skipped = first + len(token_ids), first
        if self._bound != count:
            self._bound = 0  # so that the next step binds again if this fails
            self._graphs.bind(self._kv.beginning(count))
            self._bound = count
        places = [min(position, self._kv.length - 1) for position in self._free[:first]]
        places += positions.tolist()
        self._free[first:count] = [position + 1 for position in positions.tolist()]
        ids = np.concatenate([np.zeros(first, np.int64), token_ids])
        self._graphs.begin(ids[:, None], places, [0] * count)

    def finish(self, slot_ids: npt.NDArray[np.int32], top: int = 0) -> F32:
        slots = np.concatenate([slot_ids[:1].repeat(self._skipped), slot_ids])
        return self._graphs.finish(slots[:, None], 1, top, skipped=self._skipped)

    def _close_gaps(self) -> None:
        """Move sequences to the lines of their places, which others have left."""
        for place, line in enumerate(self._lines):
            if line != place:
                self._copy(self._kv, line, place)
                self._lines[place] = place

    def _copy(self, source: KvArrays, line: int, place: int) -> None:
        """Copy keys and values of a sequence, from a line of arrays to a place here."""
        self._session.feed({io.FROM: np.array([line], np.int64), io.TO: np.array([[place]])})
        for found, array in zip(source.arrays, self._kv.arrays, strict=True):
            values = {io.LINES: _words(found), io.PLACES: _words(array)}
            self._session.bind(values | {io.NEW + io.PLACES: values[io.PLACES]})
            with onnxruntime_errors("while keys and values were copied"):
                self._session.run()
        self._session.unbind()


def _words(array: DeviceArray) -> ort.OrtValue:
    """View an array [places, ...] as words [places, n]."""
    places = array.shape[0]
    return array.value(np.int32, (places, array.nbytes // places // WORD))


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
