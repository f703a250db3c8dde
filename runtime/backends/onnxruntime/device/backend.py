"""The backbone on an execution provider's device, which holds weights, hidden states and KV cache.

A step copies ids, positions, masks, RoPE tables and its tokens' rows to the device, and requested logits to
the host. The row cache stays on the host, because a token's rows are far smaller than the weights. Graphs
see the filled part of the KV cache, rounded up to KV_STEP tokens: some providers compile a graph for each shape.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError
from stem_edge.graph import names as io
from stem_edge.graph.device import MASKED, PLACES, mask_name
from stem_edge.numerics.quantize import F32, I32, I64
from stem_edge.runtime.backends.interface import Resumes
from stem_edge.runtime.backends.onnxruntime.device.memory import DeviceArray, DeviceMemory
from stem_edge.runtime.backends.onnxruntime.loaded import padded_ropes
from stem_edge.runtime.backends.onnxruntime.providers.session import (
    BoundSession,
    onnxruntime_errors,
)
from stem_edge.runtime.rows.slots import ArraySlots
from stem_edge.system.memory import return_freed_memory

Arrays = Mapping[str, npt.NDArray[Any]]
# The bound part of the KV cache grows to a multiple of this number of tokens, and at least doubles.
KV_STEP = 256


class DeviceBackend:
    """The backend on a device; see Backend. sessions: graph name (graph/names.py) -> session."""

    def __init__(
        self,
        config: ModelConfig,
        sessions: dict[str, ort.InferenceSession],
        slots: ArraySlots | None,
        memory: DeviceMemory,
    ) -> None:
        self.config, self.sessions, self.memory = config, sessions, memory
        self.slots: Arrays = {} if slots is None else slots.inputs()

    def open_context(self, length: int) -> DeviceContext:
        """Return an empty context; all of its memory is allocated now. Raises OutOfMemoryError."""
        self.memory.collect()
        return DeviceContext(self, length)

    def open_places(self, size: int, length: int) -> None:
        """Return None: sequences share no KV memory, because the graphs compute one at a time."""

    def open_drafter(self, context: DeviceContext) -> None:
        """Return None: devices do not run the draft model of a bundle."""

    def begin(
        self,
        contexts: Sequence[DeviceContext],
        token_ids: I64,
        positions: Sequence[int],
        *,
        prefill: bool = False,
        apart: bool = False,
    ) -> None:
        """Start a step of one context; `prefill` and `apart` are ignored."""
        (context,) = contexts
        self._stepped = weakref.ref(context)  # a weak one, which keeps no memory alive
        context.begin(token_ids[0], positions[0])

    def finish(self, slot_ids: I32, logits: int) -> F32:
        if (context := self._stepped()) is None:
            raise BackendError("a step was finished whose context is gone")
        return context.finish(slot_ids, logits)

    def close(self) -> None:
        self.sessions.clear()
        self.memory.collect()
        return_freed_memory()


class DeviceContext:
    """The KV cache and hidden states of one sequence on a device; see BackendContext."""

    earliest = settled = filled = 0

    def __init__(self, backend: DeviceBackend, length: int) -> None:
        self.length, self._config, self._memory = length, backend.config, backend.memory
        self._slots = backend.slots
        self._kv: dict[str, DeviceArray] = {}
        self._graphs: dict[str, BoundSession] = {}
        for number, layer in enumerate(self._config.layers[: self._config.own_kv_layers]):
            shape = (length, layer.n_kv_heads * io.head_width(layer))
            for name in (f"{io.KEYS}{number}", f"{io.VALUES}{number}"):
                what = f"the KV cache of {length:,} tokens"
                self._kv[name] = self._memory.zeros(shape, what)
        self._graphs |= {name: BoundSession(one) for name, one in backend.sessions.items()}
        self._capacity = self._tokens = 0  # bound rows of the KV cache; bound tokens of a step
        self._position = 0

    def __del__(self) -> None:
        self._memory.retire([self._kv, self._graphs])  # not freed here: this may be any thread

    def nbytes_of(self, tokens: int) -> int:
        return sum(array.nbytes for array in self._kv.values())

    def resumes(self, tokens: int) -> Resumes:
        return ""  # the bound part of the KV cache, which may affect rounding, depends on earlier steps

    def rest(self) -> None:
        """Do nothing: a step's logits belong to the caller, so this context has none to free."""

    def kept(self, tokens: int) -> list[npt.NDArray[Any]]:
        return []

    def restore(self, arrays: Iterable[npt.NDArray[Any]], tokens: int) -> None:
        raise BackendError("a device takes no keys and values of earlier calls")

    def together(self, position: int) -> int:
        return self.length - position

    def begin(self, token_ids: I64, position: int) -> None:
        count = len(token_ids)
        self._memory.collect()
        self._position = position
        self._fit(position + count, count)
        places = np.arange(position, position + count)
        given = {io.TOKEN_IDS: token_ids[None].astype(np.int64), PLACES: places[:, None]}
        given |= self._seen(position, count)
        for name in (io.EMBED, io.EARLY, io.LATE):
            if name in self._graphs:
                self._graphs[name].feed(given)
        self._run(io.EMBED)
        self._run(io.EARLY)

    def finish(self, slot_ids: I32, logits: int) -> F32:
        rows = self._rows(slot_ids)
        if io.LATE in self._graphs:
            self._graphs[io.LATE].feed(rows)
        self._run(io.LATE)
        found = np.empty((1, logits, self._config.vocab_size), np.float32)
        first = len(slot_ids) - logits
        if logits:
            wanted = np.arange(first, len(slot_ids))
            if io.REST in self._graphs:
                self._rest(self._rows(slot_ids[first:]), wanted)
                wanted = np.arange(logits)  # all, because `rest` computes no others
            self._graphs[io.HEAD].feed({io.WANTED: wanted, io.LOGITS: found})
            self._run(io.HEAD)
        result: F32 = found[0]
        return result

    def _rows(self, slot_ids: I32) -> Arrays:
        """Return graph inputs: a copy of the rows in these slots, and new slot ids, which index this copy."""
        found = {name: slots[slot_ids] for name, slots in self._slots.items()}
        return found | {io.SLOT_IDS: np.arange(len(slot_ids))[None]}

    def _rest(self, rows: Arrays, wanted: npt.NDArray[np.int64]) -> None:
        """Run the layers that reuse an earlier layer's K and V, for the tokens at indices `wanted` of the step.

        rows: graph inputs with the rows of these tokens.
        """
        hidden = self._hidden(len(wanted))
        given = self._seen(self._position + int(wanted[0]), len(wanted))
        self._graphs[io.REST].feed({**rows, io.WANTED: wanted, **given})
        self._graphs[io.REST].bind({io.NEW + io.HIDDEN: hidden})
        self._graphs[io.HEAD].bind({io.HIDDEN: hidden})
        self._run(io.REST)

    def _run(self, name: str) -> None:
        if name in self._graphs:
            doing = f"for the backbone ({name}) at position {self._position}"
            with onnxruntime_errors(doing):
                self._graphs[name].run()

    def _bind(self, values: Mapping[str, ort.OrtValue]) -> None:
        for graph in self._graphs.values():
            graph.bind(values)

    def _fit(self, total: int, tokens: int) -> None:
        """Bind KV cache for a context of `total` tokens, and hidden states for the step's `tokens` tokens."""
        if total > self._capacity:
            wanted = max(2 * self._capacity, -(-total // KV_STEP) * KV_STEP)
            capacity, self._capacity = min(self.length, wanted), 0
            for name, array in self._kv.items():
                value = array.beginning(capacity)
                self._bind({name: value, io.NEW + name: value})
            self._capacity = capacity
        if tokens != self._tokens:
            self._tokens = 0  # so that the next step binds again if memory runs out here
            self._bind_hidden(tokens)
            self._tokens = tokens

    def _bind_hidden(self, tokens: int) -> None:
        order = (io.EMBED, io.EARLY, io.LATE, io.REST, io.HEAD)
        names = [name for name in order if name in self._graphs]
        computed = [name for name in names if name not in (io.REST, io.HEAD)]
        values = [self._hidden(tokens) for _ in computed]
        for name, value, following in zip(computed, values, names[1:], strict=False):
            self._graphs[name].bind({io.NEW + io.HIDDEN: value})
            self._graphs[following].bind({io.HIDDEN: value})
        self._bind({io.EMBEDDED: values[0]})

    def _hidden(self, tokens: int) -> ort.OrtValue:
        shape = (1, tokens, self._config.hidden_width)
        what = f"hidden states of {tokens:,} tokens"
        return self._memory.empty(shape, what).beginning(1)

    def _seen(self, position: int, count: int) -> Arrays:
        """Return RoPE tables and attention masks as graph inputs for tokens from `position` on."""
        step, lines = np.arange(position, position + count), np.arange(self._capacity)
        ago = step[:, None] - lines
        found = dict[str, npt.NDArray[Any]](padded_ropes(self._config, position + count, position))
        for window in {layer.window for layer in self._config.layers}:
            hidden = (ago < 0) | (ago >= (window or self.length))
            found[mask_name(window)] = np.where(hidden, np.float32(MASKED), np.float32(0))
        return found
