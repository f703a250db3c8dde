"""Wrappers of ggml: arenas that describe tensors, graphs over them, memory for inputs and results.

Each ggml handle is freed when its Python owner is garbage-collected. A running step refers to the
weights, so closing a model during a generation frees no memory that is still in use.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from stem_edge.errors import BackendError, OutOfMemoryError
from stem_edge.ggml import types as ggml_types
from stem_edge.ggml.gguf_schema import ALIGNMENT
from stem_edge.ggml.library import SUCCESS, Ggml, InitParams
from stem_edge.ggml.types import TensorType
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.costs import DAMAGED, LESS_MEMORY
from stem_edge.system.memory import own_pages

Tensor = int  # an opaque pointer
NO_MEMORY = -2  # GGML_STATUS_ALLOC_FAILED


def freed_with(owner: object, free: Callable[[Any], object], handle: object) -> None:
    """Free a ggml handle when its owner is garbage-collected, but not when Python exits.

    At exit a daemon thread may still compute with the handle, and the system frees the memory anyway.
    """
    weakref.finalize(owner, free, handle).atexit = False


class Arena:
    """Memory for the descriptions of tensors (type, shape, no data) and of a graph over them."""

    def __init__(self, ggml: Ggml, tensors: int) -> None:
        self.ggml = ggml
        nbytes = tensors * ggml.tensor_overhead() + ggml.graph_overhead_custom(tensors, False)
        self.context = ggml.init(InitParams(nbytes, None, True))
        if not self.context:
            raise OutOfMemoryError(
                f"ggml cannot allocate {nbytes:,} bytes to describe a graph; {LESS_MEMORY}"
            )
        freed_with(self, ggml.free, self.context)

    def tensor(self, kind: TensorType, *sizes: int) -> Tensor:
        """Add a tensor without data; sizes are in ggml's order, innermost first."""
        new = getattr(self.ggml, f"new_tensor_{len(sizes)}d")
        return int(new(self.context, kind.number, *sizes))


class MappedBuffer:
    """A ggml buffer over memory that numpy or a file mapping owns; the buffer keeps the memory alive."""

    def __init__(self, ggml: Ggml, data: npt.NDArray[np.uint8]) -> None:
        self._ggml, self._data, self._address = ggml, data, data.ctypes.data
        if self._address % ALIGNMENT:
            raise BackendError(
                f"memory for ggml begins at {self._address:#x}; expected a multiple of {ALIGNMENT}"
            )
        self._buffer = ggml.backend_cpu_buffer_from_ptr(self._address, data.nbytes)
        if not self._buffer:
            raise OutOfMemoryError(
                f"ggml cannot use a buffer of {data.nbytes:,} bytes; {LESS_MEMORY}"
            )
        freed_with(self, ggml.backend_buffer_free, self._buffer)

    def place(self, tensor: Tensor, offset: int = 0) -> None:
        if offset % ALIGNMENT or offset + self._ggml.nbytes(tensor) > self._data.nbytes:
            raise BackendError(
                f"a tensor at offset {offset} is not aligned to {ALIGNMENT} bytes, or ends beyond "
                f"its memory of {self._data.nbytes:,} bytes"
            )
        self._ggml.backend_tensor_alloc(self._buffer, tensor, self._address + offset)


class Processor:
    """ggml's CPU backend with its threads, which computes graphs."""

    def __init__(self, ggml: Ggml, threads: int) -> None:
        self.ggml = ggml
        self.handle = ggml.backend_cpu_init()
        if not self.handle:
            raise BackendError("ggml cannot start its CPU backend; free some memory and try again")
        freed_with(self, ggml.backend_free, self.handle)
        ggml.backend_cpu_set_n_threads(self.handle, threads)


class Scratch:
    """Memory for intermediate results, shared by graphs that never run at the same time."""

    def __init__(self, ggml: Ggml) -> None:
        self._ggml = ggml
        self._handle = ggml.gallocr_new(ggml.backend_cpu_buffer_type())
        freed_with(self, ggml.gallocr_free, self._handle)

    @property
    def nbytes(self) -> int:
        return int(self._ggml.gallocr_get_buffer_size(self._handle, 0))

    def place(self, graph: GgmlGraph) -> bool:
        """Assign this memory to a graph's tensors; return True if that made earlier graphs invalid."""
        before = self.nbytes
        # Needed because alloc_graph alone keeps the layout of an earlier graph with as many nodes.
        placed = self._ggml.gallocr_reserve(self._handle, graph.handle)
        if not placed or not self._ggml.gallocr_alloc_graph(self._handle, graph.handle):
            raise OutOfMemoryError(
                f"ggml cannot allocate memory for the results of a step; {LESS_MEMORY}"
            )
        return self.nbytes != before


class GgmlGraph:
    """A graph that runs its operators in the order in which they were emitted."""

    def __init__(self, processor: Processor, size: int) -> None:
        self.ggml, self._processor = processor.ggml, processor
        self.arena = Arena(self.ggml, size)
        self.handle = self.ggml.new_graph_custom(self.arena.context, size, False)

    def op(self, name: str, *arguments: Any) -> Tensor:
        """Return the result tensor of the ggml operator `name` on tensors of this graph."""
        return int(getattr(self.ggml, name)(self.arena.context, *arguments))

    def input(self, kind: TensorType, *sizes: int) -> Tensor:
        """Add a tensor that `set` fills before each run."""
        tensor = self.arena.tensor(kind, *sizes)
        self.ggml.set_input(tensor)
        # Otherwise an input that no operator reads gets no memory, and `set` fails.
        self.emit(tensor)
        return tensor

    def emit(self, tensor: Tensor) -> None:
        """Make each run compute this tensor, after its inputs and after all tensors emitted before."""
        self.ggml.build_forward_expand(self.handle, tensor)

    def columns(
        self, tensor: Tensor, kind: TensorType, width: int, first: int, count: int
    ) -> Tensor:
        """Return a view of `count` columns, from `first` on, of a contiguous tensor [width, columns] of type `kind`."""
        nbytes = kind.row_nbytes(width)
        return self.op("view_2d", tensor, width, count, nbytes, first * nbytes)

    def set(self, tensor: Tensor, values: npt.NDArray[Any]) -> None:
        """Fill an input with a contiguous array, which must have the input's size in bytes."""
        if values.nbytes != self.ggml.nbytes(tensor):
            raise BackendError(
                f"an input takes {self.ggml.nbytes(tensor)} bytes, given {values.nbytes}"
            )
        self.ggml.backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)

    def run(self) -> None:
        """Compute the graph. Raises BackendError, OutOfMemoryError."""
        status = self.ggml.backend_graph_compute(self._processor.handle, self.handle)
        if status == NO_MEMORY:
            raise OutOfMemoryError(f"ggml has no memory left to compute a graph; {LESS_MEMORY}")
        if status != SUCCESS:
            raise BackendError(f"ggml could not compute a graph (status {status}); {DAMAGED}")


class HeldVectors:
    """A float32 array [count, width] that outlives a run: logits, or hidden states between graphs."""

    def __init__(self, ggml: Ggml, width: int, count: int) -> None:
        self.count, self._width = count, width
        data = own_pages((max(1, count) * width * ggml_types.F32.nbytes,), np.uint8)
        self._memory = MappedBuffer(ggml, data)
        self.values: F32 = data.view(np.float32).reshape(-1, width)[:count]

    def tensor(self, graph: GgmlGraph, count: int) -> Tensor:
        """Return the first `count` rows of the array, as a tensor [width, count] of a graph."""
        made = graph.arena.tensor(ggml_types.F32, self._width, count)
        self._memory.place(made)
        return made

    def take(self, result: Tensor) -> None:
        """Make the operator that computes the tensor `result` write to this array."""
        self._memory.place(result)
