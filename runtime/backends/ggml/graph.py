"""Graphs of ggml: an arena that describes tensors, a graph over it, memory for what it reads and
computes.

All handles are freed when their owner is collected, in the order of their references: a context
keeps the weights, so closing a model while one generates frees nothing that is still read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError, OutOfMemoryError
from stem_edge.ggml import types as ggml_types
from stem_edge.ggml.gguf_schema import ALIGNMENT
from stem_edge.ggml.library import SUCCESS, Ggml, InitParams
from stem_edge.ggml.types import TensorType
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import DAMAGED, LESS_MEMORY
from stem_edge.system.memory import page_aligned

Tensor = int  # an opaque pointer
NO_MEMORY = -2  # GGML_STATUS_ALLOC_FAILED
# A graph attends to a number of cells that is a multiple of this, those beyond its tokens masked: a
# decoding graph serves so many steps.
CELLS = 64


def freed_with(owner: object, free: Callable[[Any], object], handle: object) -> None:
    """Free a handle when its owner is collected; at the end of the process, the system frees it.

    At exit a daemon thread may still compute with it.
    """
    weakref.finalize(owner, free, handle).atexit = False


class Arena:
    """Descriptions of up to so many tensors, and of a graph over them. No data."""

    def __init__(self, ggml: Ggml, tensors: int) -> None:
        self.ggml = ggml
        nbytes = tensors * ggml.tensor_overhead() + ggml.graph_overhead_custom(tensors, False)
        self.context = ggml.init(InitParams(nbytes, None, True))
        if not self.context:
            raise OutOfMemoryError(
                f"ggml cannot take {nbytes:,} bytes for the description of a graph; {LESS_MEMORY}"
            )
        freed_with(self, ggml.free, self.context)

    def tensor(self, kind: TensorType, *sizes: int) -> Tensor:
        """A new tensor; sizes innermost first, as ggml counts."""
        new = getattr(self.ggml, f"new_tensor_{len(sizes)}d")
        return int(new(self.context, kind.number, *sizes))


class Memory:
    """A buffer over bytes that numpy or a file mapping owns, which live as long as it does."""

    def __init__(self, ggml: Ggml, data: npt.NDArray[np.uint8]) -> None:
        self._ggml, self._data, self._address = ggml, data, data.ctypes.data
        if self._address % ALIGNMENT:
            raise BackendError(f"memory for ggml begins at no multiple of {ALIGNMENT} bytes")
        self._buffer = ggml.backend_cpu_buffer_from_ptr(self._address, data.nbytes)
        if not self._buffer:
            raise OutOfMemoryError(
                f"ggml cannot use a buffer of {data.nbytes:,} bytes; {LESS_MEMORY}"
            )
        freed_with(self, ggml.backend_buffer_free, self._buffer)

    def place(self, tensor: Tensor, offset: int = 0) -> None:
        """Let a tensor's data begin so many bytes into this memory."""
        if offset % ALIGNMENT or offset + self._ggml.nbytes(tensor) > self._data.nbytes:
            raise BackendError(
                f"a tensor at {offset} is not aligned, or ends beyond its memory of "
                f"{self._data.nbytes:,} bytes"
            )
        self._ggml.backend_tensor_alloc(self._buffer, tensor, self._address + offset)


class Processor:
    """The backend that computes, with its threads."""

    def __init__(self, ggml: Ggml, threads: int) -> None:
        self.ggml = ggml
        self.handle = ggml.backend_cpu_init()
        if not self.handle:
            raise BackendError("ggml cannot start its CPU backend; free some memory and try again")
        freed_with(self, ggml.backend_free, self.handle)
        ggml.backend_cpu_set_n_threads(self.handle, threads)


class Scratch:
    """Memory for the results of operators, which graphs that never run at once share."""

    def __init__(self, ggml: Ggml) -> None:
        self._ggml = ggml
        self._handle = ggml.gallocr_new(ggml.backend_cpu_buffer_type())
        freed_with(self, ggml.gallocr_free, self._handle)

    @property
    def nbytes(self) -> int:
        """Bytes taken so far."""
        return int(self._ggml.gallocr_get_buffer_size(self._handle, 0))

    def place(self, graph: Graph) -> bool:
        """Give every tensor of a graph its place. Returns whether older graphs lost theirs."""
        before = self.nbytes
        # By itself, it would keep the places that a graph of as many operators had.
        placed = self._ggml.gallocr_reserve(self._handle, graph.handle)
        if not placed or not self._ggml.gallocr_alloc_graph(self._handle, graph.handle):
            raise OutOfMemoryError(
                f"ggml cannot take the memory that the results of a step need; {LESS_MEMORY}"
            )
        return self.nbytes != before


class Graph:
    """Operators in the order in which they were emitted."""

    def __init__(self, processor: Processor, size: int) -> None:
        self.ggml, self._processor = processor.ggml, processor
        self.arena = Arena(self.ggml, size)
        self.handle = self.ggml.new_graph_custom(self.arena.context, size, False)

    def op(self, name: str, *arguments: Any) -> Tensor:
        """An operator on tensors of this graph, by ggml's name."""
        return int(getattr(self.ggml, name)(self.arena.context, *arguments))

    def input(self, kind: TensorType, *sizes: int) -> Tensor:
        """A tensor that `set` fills before each run."""
        tensor = self.arena.tensor(kind, *sizes)
        self.ggml.set_input(tensor)
        # An input that no operator reads would have no place.
        self.emit(tensor)
        return tensor

    def emit(self, tensor: Tensor) -> None:
        """Compute this tensor after all that were emitted before."""
        self.ggml.build_forward_expand(self.handle, tensor)

    def set(self, tensor: Tensor, values: npt.NDArray[Any]) -> None:
        """Fill an input with a contiguous array of its size in bytes."""
        if values.nbytes != self.ggml.nbytes(tensor):
            raise BackendError(
                f"an input takes {self.ggml.nbytes(tensor)} bytes, given {values.nbytes}"
            )
        self.ggml.backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)

    def run(self) -> None:
        """Compute everything. Raises BackendError, OutOfMemoryError."""
        status = self.ggml.backend_graph_compute(self._processor.handle, self.handle)
        if status == NO_MEMORY:
            raise OutOfMemoryError(f"ggml has no memory left for a graph; {LESS_MEMORY}")
        if status != SUCCESS:
            raise BackendError(f"ggml could not compute a graph (status {status}); {DAMAGED}")


class KvCache:
    """Keys and values of all layers; pages of memory come as cells are written."""

    def __init__(self, ggml: Ggml, config: ModelConfig, kind: TensorType, length: int) -> None:
        self.cells, width = rounded(length), config.n_kv_heads * config.head_dim
        self._token_nbytes = 2 * config.n_layers * kind.row_nbytes(width)
        size = self.cells * kind.row_nbytes(width)
        self._memory = Memory(ggml, page_aligned((2 * config.n_layers * size,)))
        self._arena, self._filled = Arena(ggml, 2 * config.n_layers), 0
        made = []
        for number in range(2 * config.n_layers):
            made.append(self._arena.tensor(kind, width, self.cells))
            self._memory.place(made[-1], number * size)
        # Of each layer, [n_kv_heads * head_dim, cells].
        self.type, self.keys, self.values = kind, made[0::2], made[1::2]

    @property
    def nbytes(self) -> int:
        """Bytes of the cells that were written."""
        return self._filled * self._token_nbytes

    def fill(self, tokens: int) -> None:
        """Take note of how many there are."""
        self._filled = max(self._filled, tokens)


class Columns:
    """Vectors float32 [count, width] that outlive a run: hidden states between graphs, logits."""

    def __init__(self, ggml: Ggml, width: int, count: int) -> None:
        self.count, self._width = count, width
        data = page_aligned((max(1, count) * width * ggml_types.F32.nbytes,))
        self._memory = Memory(ggml, data)
        self.values: F32 = data.view(np.float32).reshape(-1, width)[:count]

    def tensor(self, graph: Graph, count: int) -> Tensor:
        """The first `count` as a tensor of a graph, [width, count]."""
        made = graph.arena.tensor(ggml_types.F32, self._width, count)
        self._memory.place(made)
        return made

    def take(self, result: Tensor) -> None:
        """Let the result of an operator be written here."""
        self._memory.place(result)


def rounded(tokens: int) -> int:
    """Cells that a graph for so many tokens attends to."""
    return -(-tokens // CELLS) * CELLS
