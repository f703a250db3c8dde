"""The backbone in graphs of standard ONNX operators, for providers without onnxruntime's own.

The path is simple rather than fast: rows become float32 here. The filled part of the KV cache lies
in this process's memory and is an input of each step. Its length is rounded up and the rest masked,
so that shapes rarely change: some providers compile the graph again for each shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError
from stem_edge.graph import names as io
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import BackendBatch, BackendContext, Resumes, check_logits
from stem_edge.runtime.backends.onnxruntime.loaded import CANNOT_READ, open_sessions, padded_ropes
from stem_edge.runtime.backends.onnxruntime.providers.provider import Provider
from stem_edge.runtime.backends.onnxruntime.providers.session import GraphSource, onnxruntime_errors
from stem_edge.runtime.backends.plain_batch import PlainBatch
from stem_edge.runtime.rows.slots import ArraySlots, Slots
from stem_edge.system.memory import own_pages, return_freed_memory

Arrays = dict[str, npt.NDArray[Any]]
# The part of the KV cache that goes into a step grows to a multiple of this, and at least doubles.
KV_STEP = 256


class PortableBackend:
    """Portable graphs, by their names. Raises BackendError, OutOfMemoryError."""

    def __init__(
        self,
        config: ModelConfig,
        graphs: Mapping[str, Path | GraphSource],
        slots: Slots | None,
        threads: int,
        providers: Sequence[Provider],
    ) -> None:
        if slots is not None and not isinstance(slots, ArraySlots):
            raise BackendError(CANNOT_READ)
        self._config, self._slots = config, slots
        self.sessions = open_sessions(graphs, threads, providers)

    def open_context(self, length: int) -> BackendContext:
        """Return an empty context, as OrtBackend does."""
        return PortableContext(self._config, self.sessions, self._slots, length)

    def open_batch(self, size: int, length: int) -> BackendBatch:
        """Return an empty batch, which takes one sequence at a time."""
        return PlainBatch()

    def close(self) -> None:
        """Release the sessions."""
        self.sessions.clear()
        return_freed_memory()


class PortableContext:
    """KV cache of one generation, and the hidden states between the two halves of a step."""

    earliest = settled = 0

    def __init__(
        self,
        config: ModelConfig,
        sessions: Mapping[str, ort.InferenceSession],
        slots: ArraySlots | None,
        length: int,
    ) -> None:
        self.length, self._config = length, config
        self._sessions, self._slots = sessions, slots
        self._kv: dict[str, F32] = {}
        for number, layer in enumerate(config.layers[: config.own_kv_layers]):
            shape = (1, length, layer.n_kv_heads, io.head_width(layer))
            for cache in (io.KEYS, io.VALUES):
                self._kv[f"{cache}{number}"] = own_pages(shape, np.float32)
        self._capacity, self._position = 0, 0
        self._filled = 0  # cells with keys and values
        self._step: Arrays = {}  # inputs that the graphs of a step share
        self._hidden = np.empty((1, 0, config.hidden_width), np.float32)

    @property
    def nbytes(self) -> int:
        return self.nbytes_of(self._filled)

    def nbytes_of(self, tokens: int) -> int:
        return sum(array[:, :tokens].nbytes for array in self._kv.values())

    def resumes(self, tokens: int) -> Resumes:
        return ""  # the shapes of a step follow from those before

    def rest(self) -> None:
        self._step, self._hidden = {}, self._hidden[:, :0].copy()

    def kept(self, tokens: int) -> list[npt.NDArray[Any]]:
        return []

    def restore(self, arrays: Iterable[npt.NDArray[Any]], tokens: int) -> None:
        raise BackendError("portable graphs take no keys and values of earlier calls")

    def together(self, position: int) -> int:
        return self.length - position

    def begin(
        self,
        token_ids: npt.NDArray[np.int64],
        position: int,
        *,
        prefill: bool = False,
        apart: bool = False,
    ) -> None:
        count = len(token_ids)
        self._position = position
        for array in self._kv.values():
            # A failed step may have left NaN, and a mask does not help: 0 * NaN is NaN.
            array[:, position : self._filled] = 0
        self._filled = position
        if position + count > self._capacity:
            wanted = -(-(position + count) // KV_STEP) * KV_STEP
            self._capacity = min(self.length, max(2 * self._capacity, wanted))
        self._step = self._places(position, count)
        self._hidden = self._run(io.EMBED, {io.TOKEN_IDS: token_ids[None].astype(np.int64)})
        self._step[io.EMBEDDED] = self._hidden
        if io.EARLY in self._sessions:
            self._hidden = self._run(io.EARLY, {io.HIDDEN: self._hidden})

    def finish(self, slot_ids: npt.NDArray[np.int32], logits: int, top: int = 0) -> F32:
        """Complete a step; `top` changes nothing, because all logits are in host memory."""
        hidden, count = self._hidden, len(slot_ids)
        if io.LATE in self._sessions:
            hidden = self._run(io.LATE, {io.HIDDEN: hidden} | self._rows(io.LATE, slot_ids))
        if not logits:
            return np.empty((0, self._config.vocab_size), np.float32)
        wanted = np.arange(count - logits, count, dtype=np.int64)
        if io.REST in self._sessions:
            given: Arrays = {io.HIDDEN: hidden, io.WANTED: wanted}
            given |= self._rows(io.REST, slot_ids[count - logits :])
            self._step |= self._places(self._position + count - logits, logits, own=False)
            hidden, wanted = self._run(io.REST, given), np.arange(logits)
        found = self._run(io.HEAD, {io.HIDDEN: hidden, io.WANTED: wanted})
        return check_logits(found[0], self._position + count - logits)

    def _run(self, name: str, given: Arrays) -> F32:
        """Run a graph; store its keys and values, and return its first output."""
        session = self._sessions[name]
        cache = {name: array[:, : self._capacity] for name, array in self._kv.items()}
        available = given | self._step | cache
        inputs = {value.name: available[value.name] for value in session.get_inputs()}
        outputs = [value.name for value in session.get_outputs()]
        with onnxruntime_errors(f"for the backbone ({name}) at position {self._position}"):
            first, *rest = session.run(outputs, inputs)
        for output, new in zip(outputs[1:], rest, strict=True):
            self._filled = self._position + new.shape[1]
            self._kv[output.removeprefix(io.NEW)][:, self._position : self._filled] = new
        result: F32 = first
        return result

    def _places(self, position: int, count: int, *, own: bool = True) -> Arrays:
        """Return what follows from the positions of some tokens: RoPE, and a mask for each window.

        own: whether their keys are beside the cache, not in it; then a mask is [T, P + T], else [T, P].
        """
        step, before = np.arange(position, position + count), np.arange(self._capacity)
        # Cells not filled yet get a position after all tokens, so that no token attends to them.
        places = np.where(before < self._filled, before, self.length)
        ago = step[:, None] - (np.concatenate([places, step]) if own else places)
        found: Arrays = dict(padded_ropes(self._config, position + count, position))
        for window in {layer.window for layer in self._config.layers}:
            hidden = (ago < 0) | (ago >= (window or self.length))
            found[io.mask_name(window)] = np.where(hidden, np.float32(io.MASKED), np.float32(0))
        return found

    def _rows(self, name: str, slot_ids: npt.NDArray[np.int32]) -> Arrays:
        """Return the rows [1, T, width] of a graph's STEM layers in these slots."""
        rows: Arrays = {}
        if self._slots is None:
            return rows
        layout, slots = self._slots.layout, self._slots
        for layer in {*io.layer_graphs(self._config)[name]} & {*layout.layers}:
            index = layout.layers.index(layer)
            codes = slots.codes[index][0][slot_ids]
            scales = slots.scales[index][0][slot_ids] if slots.scales else None
            rows[io.row_name(layer)] = layout.values(codes, scales)[None]
        return rows
