"""The backbone with everything in the memory of a device: hidden states, KV cache, rows, logits.

Into a step go ids, places and lengths, a few bytes a token; out comes the logits of those tokens
that they are wanted of, or only the largest of them. The sessions run the variants "fp32" or "fp16"
(stem_edge.graph.names). On a provider without memory of its own all of it is in this process's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.graph.device_rows import Activations
from stem_edge.quantize import F32
from stem_edge.rope import rope_tables
from stem_edge.runtime.backend import check_logits
from stem_edge.runtime.bound_session import BoundSession, View
from stem_edge.runtime.device_memory import DeviceArray, DeviceMemory
from stem_edge.runtime.device_slots import DeviceSlots
from stem_edge.runtime.graphs import GraphSource
from stem_edge.runtime.machine import return_freed_memory
from stem_edge.runtime.ort_session import open_session
from stem_edge.runtime.providers import Provider

FLOATS: dict[Activations, type[np.floating[Any]]] = {"fp32": np.float32, "fp16": np.float16}


class DeviceBackend:
    """Sessions over some graphs, by their names, of the variant `activations`.

    Raises BackendError, OutOfMemoryError.
    """

    def __init__(
        self,
        config: ModelConfig,
        graphs: Mapping[str, Path | GraphSource],
        slots: DeviceSlots | None,
        threads: int,
        providers: Sequence[Provider],
        memory: DeviceMemory,
        activations: Activations,
    ) -> None:
        self.config, self.memory, self.dtype = config, memory, np.dtype(FLOATS[activations])
        self.slots = slots
        self.sessions: dict[str, ort.InferenceSession] = {}
        for name, graph in graphs.items():
            if name != io.ROWS:  # which the slots run
                self.sessions[name] = open_session(graph, threads, providers)
                return_freed_memory()  # what packing took

    def open_context(self, length: int) -> DeviceContext:
        """An empty context for up to `length` tokens, with all memory that it will need.

        Raises OutOfMemoryError.
        """
        self.memory.collect()
        return DeviceContext(self, length)

    @property
    def nbytes(self) -> int:
        """Bytes of the device's memory that contexts and slots hold, without weights."""
        return self.memory.nbytes

    def close(self) -> None:
        """Release sessions and slots."""
        self.sessions.clear()
        if self.slots is not None:
            self.slots.close()
        self.memory.collect()
        return_freed_memory()


class DeviceContext:
    """KV cache, tables and hidden states of one generation.

    They are free with the next call to the backend after this was dropped.
    """

    def __init__(self, backend: DeviceBackend, length: int) -> None:
        self._memory, self._dtype = backend.memory, backend.dtype
        self.length, self._config = length, backend.config
        self._kv: list[DeviceArray] = []
        self._graphs: dict[str, BoundSession] = {}
        for name, session in backend.sessions.items():
            self._graphs[name] = BoundSession(session)
        self._position, self._count = 0, -1  # tokens of the step that hidden states are for
        for graph in self._graphs.values():
            if backend.slots is not None:
                backend.slots.bind(graph)
        self._bind_fixed()
        self._output = _Output(self._graphs, backend)

    def __del__(self) -> None:
        self._memory.retire((self._graphs, self._kv))  # in whatever thread this may be

    @property
    def nbytes(self) -> int:
        """See BackendContext.nbytes; all of it from the beginning."""
        return sum(array.nbytes for array in self._kv)

    def begin(
        self, token_ids: npt.NDArray[np.int64], position: int, *, prefill: bool = False
    ) -> None:
        """See BackendContext.begin."""
        count, total = len(token_ids), position + len(token_ids)
        self._memory.collect()
        self._position = position
        if count != self._count:
            self._bind_hidden(count)
        lengths: dict[str, npt.NDArray[Any]] = {
            io.TOKEN_IDS: np.asarray(token_ids, np.int64)[None],
            io.SEQLENS_K: np.array([total - 1], np.int32),
            io.TOTAL_LENGTH: np.array(total, np.int32),
        }
        for name in self._layers():
            self._graphs[name].feed(lengths, self._doing(name))
        self._run(io.EMBED)
        if io.EARLY in self._graphs:
            self._run(io.EARLY)

    def finish(self, slot_ids: npt.NDArray[np.int32], logits: int, top: int = 0) -> F32:
        """See BackendContext.finish."""
        if io.LATE in self._graphs:
            self._graphs[io.LATE].feed(
                {io.SLOT_IDS: np.asarray(slot_ids, np.int64)[None]}, self._doing(io.LATE)
            )
            self._run(io.LATE)
        if not logits:
            return np.empty((0, self._config.vocab_size), np.float32)
        first = self._position + self._count - logits
        return self._output.logits(self._count, logits, top, first, self._doing(io.HEAD))

    def _layers(self) -> list[str]:
        return [name for name in (io.EMBED, io.EARLY, io.LATE) if name in self._graphs]

    def _run(self, name: str) -> None:
        self._graphs[name].run(self._doing(name))

    def _doing(self, name: str) -> str:
        return f"for the backbone ({name}) at position {self._position}"

    def _bind_fixed(self) -> None:
        """What stays the same as long as the context lives; the largest first, lest it does not fit."""
        config, length, width = self._config, self.length, io.head_width(self._config)
        shape = (1, config.n_kv_heads, length, width)
        for layer in range(config.n_layers):
            for name in (f"{io.KEYS}{layer}", f"{io.VALUES}{layer}"):
                what = f"the KV cache of {length:,} tokens"
                array = self._memory.empty(shape, self._dtype, what)
                self._kv.append(array)
                self._bind({name: View(array), io.NEW + name: View(array)})
        padding = ((0, 0), (0, (width - config.head_dim) // 2))
        names = (io.ROPE_COS, io.ROPE_SIN)
        for name, table in zip(names, rope_tables(config, length), strict=True):
            padded = np.pad(table, padding).astype(self._dtype)
            self._bind({name: View(self._memory.put(padded, "tables of RoPE"))})

    def _bind(self, views: Mapping[str, View]) -> None:
        for graph in self._graphs.values():
            graph.bind(views)

    def _bind_hidden(self, count: int) -> None:
        """Hidden states of so many tokens, one array for each graph's output."""
        shape, what = (1, count, self._config.dim), f"the hidden states of {count:,} tokens"
        names = self._layers()
        # All before any is bound: where memory runs out, nothing has changed.
        arrays = [View(self._memory.empty(shape, self._dtype, what)) for _ in names]
        self._count = -1
        self._output.forget()
        for name, view, following in zip(names, arrays, [*names[1:], io.HEAD], strict=True):
            self._graphs[name].bind({io.NEW + io.HIDDEN: view})
            self._graphs[following].bind({io.HIDDEN: view})
        self._count = count


class _Output:
    """The head of a context, and what of its logits goes to the host."""

    def __init__(self, graphs: Mapping[str, BoundSession], backend: DeviceBackend) -> None:
        self._head, self._top = graphs[io.HEAD], graphs.get(io.TOP)
        self._memory, self._vocab_size = backend.memory, backend.config.vocab_size
        self._bound: tuple[int, int] | None = None  # logits, and how many of the largest of each
        self._logits: F32 = np.empty((1, 0, 0), np.float32)
        self._set = np.zeros((0, 0), np.int64)  # ids whose logits are not -inf

    def forget(self) -> None:
        """Hidden states are others now."""
        self._bound = None

    def logits(self, count: int, wanted: int, top: int, first: int, doing: str) -> F32:
        """Logits [wanted, V] of the last tokens of `count`; `first` is their first position."""
        if self._top is None or top >= self._vocab_size:
            top = 0
        if self._bound != (wanted, top):
            self._bind(count, wanted, top, doing)
        self._head.run(doing)
        if self._top is None or not top:
            return check_logits(self._logits[0], first)
        self._top.run(doing)
        check_logits(self._largest[0], first)
        logits: F32 = self._logits[0]
        np.put_along_axis(logits, self._set, -np.inf, 1)
        self._set = self._ids[0].copy()
        np.put_along_axis(logits, self._set, self._largest[0], 1)
        return logits

    def _bind(self, count: int, wanted: int, top: int, doing: str) -> None:
        self._bound = None  # where memory runs out, the next step begins anew
        shape = (1, wanted, self._vocab_size)
        places = np.arange(count - wanted, count, dtype=np.int64)
        self._head.feed({io.WANTED: places}, doing)
        if self._top is None or not top:
            self._logits = np.empty(shape, np.float32)
            self._head.give(io.LOGITS, self._logits)
        else:
            on_device = View(self._memory.empty(shape, np.float32, "logits"))
            self._head.bind({io.LOGITS: on_device})
            self._top.bind({io.LOGITS: on_device})
            self._top.feed({io.COUNT: np.array([top], np.int64)}, doing)
            self._largest = np.empty((1, wanted, top), np.float32)
            self._ids = np.empty((1, wanted, top), np.int64)
            self._top.give(io.TOP_LOGITS, self._largest)
            self._top.give(io.TOP_IDS, self._ids)
            self._logits = np.full(shape, -np.inf, np.float32)
            self._set = np.zeros((wanted, 0), np.int64)
        self._bound = wanted, top
