"""The backbone as graphs of ONNX's own operators, for providers that lack those of onnxruntime.

A correct and simple path: rows become float32 here, the KV cache lies in this process's memory and
goes into each step whole. What of it is not filled yet is masked, so that its shape, which some
providers compile graphs for, changes only when it grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError
from stem_edge.graph import names as io
from stem_edge.graph.names import mask_name, row_name
from stem_edge.quantize import F32, dequantize_blocks
from stem_edge.rope import rope_tables
from stem_edge.rows import RecordLayout
from stem_edge.runtime.backend import DAMAGED, check_logits, check_memory, reason
from stem_edge.runtime.backend_ort import grow_kv, grown_capacity
from stem_edge.runtime.graphs import GraphSource
from stem_edge.runtime.machine import return_freed_memory
from stem_edge.runtime.ort_session import open_session
from stem_edge.runtime.providers import Provider
from stem_edge.runtime.slots import ArraySlots

Arrays = dict[str, npt.NDArray[Any]]


class PortableBackend:
    """Sessions over the portable graphs in `files` (graph -> file). Raises BackendError."""

    def __init__(
        self,
        config: ModelConfig,
        layout: RecordLayout | None,
        graphs: Mapping[str, Path | GraphSource],
        slots: ArraySlots | None,
        threads: int,
        providers: Sequence[Provider],
    ) -> None:
        self._config, self._layout, self._slots = config, layout, slots
        self._sessions = {
            name: open_session(graph, threads, providers) for name, graph in graphs.items()
        }
        return_freed_memory()

    def open_context(self, length: int) -> PortableContext:
        """See Backend.open_context."""
        return PortableContext(self._config, self._layout, self._sessions, self._slots, length)

    def close(self) -> None:
        """See Backend.close."""
        self._sessions.clear()
        return_freed_memory()


class PortableContext:
    """The KV cache of one generation, and the hidden state between the two halves of a step."""

    def __init__(
        self,
        config: ModelConfig,
        layout: RecordLayout | None,
        sessions: Mapping[str, ort.InferenceSession],
        slots: ArraySlots | None,
        length: int,
    ) -> None:
        self.length = length
        self._config, self._layout, self._slots = config, layout, slots
        self._sessions = sessions
        self._rope = rope_tables(config, length)
        self._kv: dict[str, F32] = {}
        self._capacity, self._position = 0, 0
        self._filled = 0  # places that a step has put keys and values into
        self._step: Arrays = {}  # inputs of the step that do not depend on rows
        self._hidden = np.empty((1, 0, config.dim), np.float32)

    @property
    def nbytes(self) -> int:
        """See BackendContext.nbytes."""
        return sum(array.nbytes for array in self._kv.values())

    def begin(
        self, token_ids: npt.NDArray[np.int64], position: int, *, prefill: bool = False
    ) -> None:
        """See BackendContext.begin."""
        count = len(token_ids)
        self._position = position
        self._forget(position)
        self._grow(position + count)
        self._step = self._places(count) | self._masks(count)
        self._hidden = self._run(io.EMBED, {io.TOKEN_IDS: token_ids[None].astype(np.int64)})
        if io.EARLY in self._sessions:
            self._hidden = self._run(io.EARLY, {io.HIDDEN: self._hidden})

    def finish(self, slot_ids: npt.NDArray[np.int32], logits: int, top: int = 0) -> F32:
        """See BackendContext.finish."""
        hidden, count = self._hidden, len(slot_ids)
        if io.LATE in self._sessions:
            hidden = self._run(io.LATE, {io.HIDDEN: hidden} | self._rows(slot_ids))
        if not logits:
            return np.empty((0, self._config.vocab_size), np.float32)
        wanted = np.arange(count - logits, count, dtype=np.int64)
        found = self._run(io.HEAD, {io.HIDDEN: hidden, io.WANTED: wanted})
        return check_logits(found[0], self._position + count - logits)

    def _run(self, name: str, given: Arrays) -> F32:
        """What a graph gives first; its keys and values are put into place."""
        session = self._sessions[name]
        # Where memory ran out while they grew, some are longer.
        cache = {name: array[:, :, : self._capacity] for name, array in self._kv.items()}
        available = given | self._step | cache
        inputs = {value.name: available[value.name] for value in session.get_inputs()}
        outputs = [value.name for value in session.get_outputs()]
        try:
            found: dict[str, F32] = dict(zip(outputs, session.run(outputs, inputs), strict=True))
        except Exception as error:  # see open_session
            check_memory(error, f"for the backbone ({name}) at position {self._position}")
            raise BackendError(
                f"the backbone ({name}) failed at position {self._position}: {reason(error)}; {DAMAGED}"
            ) from error
        for output in outputs[1:]:
            new = found[output]
            self._filled = self._position + new.shape[2]
            whole = self._kv[output.removeprefix(io.NEW)]
            whole[:, :, self._position : self._filled] = new
        return found[outputs[0]]

    def _forget(self, position: int) -> None:
        """Clear what a step that failed left: nothing times what is no number is no number."""
        if position < self._filled:
            for array in self._kv.values():
                array[:, :, position : self._filled] = 0
        self._filled = position

    def _places(self, count: int) -> Arrays:
        """Angles of the step's places, zeros where heads are padded."""
        padding = ((0, 0), (0, (io.head_width(self._config) - self._config.head_dim) // 2))
        places = slice(self._position, self._position + count)
        cos, sin = (np.pad(table[places], padding) for table in self._rope)
        return {io.ROPE_COS: cos, io.ROPE_SIN: sin}

    def _masks(self, count: int) -> Arrays:
        """For each width of a window, what each token of the step sees: [T, P + T]."""
        step = np.arange(self._position, self._position + count)
        before = np.arange(self._capacity)
        # No token has a place after its own, so what is not filled is in no token's past.
        places = np.concatenate([np.where(before < self._position, before, self.length), step])
        ago = step[:, None] - places
        masks: Arrays = {}
        for window in {self._config.window(layer) for layer in range(self._config.n_layers)}:
            hidden = (ago < 0) | (ago >= (window or self.length))
            masks[mask_name(window)] = np.where(hidden, np.float32(io.MASKED), np.float32(0))
        return masks

    def _rows(self, slot_ids: npt.NDArray[np.int32]) -> Arrays:
        """Rows [1, T, width] of the tokens in these slots."""
        layout, slots = self._layout, self._slots
        if layout is None or slots is None:
            return {}
        rows: Arrays = {}
        for index, layer in enumerate(layout.layers):
            codes = slots.codes[index][0][slot_ids]
            if layout.quantized:
                scales = slots.scales[index][0][slot_ids]
                values = dequantize_blocks(codes.view(np.uint8), scales, layout.bits)
            else:
                values = codes.astype(np.float32)
            rows[row_name(layer)] = values[None]
        return rows

    def _grow(self, tokens: int) -> None:
        """Make room for so many tokens in the KV cache, layer by layer."""
        if tokens <= self._capacity:
            return
        capacity = grown_capacity(self._capacity, tokens, self.length)
        for _ in grow_kv(self._config, self._kv, self._capacity, capacity):
            pass
        self._capacity = capacity  # last: where memory ran out, the next step begins this anew
