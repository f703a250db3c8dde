"""The backbone on onnxruntime: a session a graph, everything bound in place, nothing copied by a step.

The slots of the row cache and the KV buffers are bound when they are made. Small inputs live in
fixed arrays that a step overwrites; only the arrays whose length follows the number of tokens are
bound again when that number changes, which in decoding it does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError
from stem_edge.graph import names as io
from stem_edge.quantize import F32
from stem_edge.rope import rope_tables
from stem_edge.runtime.backend import DAMAGED, check_logits, check_memory, reason
from stem_edge.runtime.graphs import GraphSource
from stem_edge.runtime.machine import own_pages, return_freed_memory
from stem_edge.runtime.ort_session import open_session
from stem_edge.runtime.providers import Provider
from stem_edge.runtime.slots import ArraySlots

Arrays = dict[str, npt.NDArray[Any]]
# The KV cache begins with room for so many tokens, and doubles when it is full: it is copied then.
KV_STEP = 256


class OrtBackend:
    """Sessions over some graphs, by their names. Raises BackendError."""

    def __init__(
        self,
        config: ModelConfig,
        graphs: Mapping[str, Path | GraphSource],
        slots: ArraySlots | None,
        threads: int,
        providers: Sequence[Provider],
    ) -> None:
        self.config = config
        self.sessions: dict[str, ort.InferenceSession] = {}
        for name, graph in graphs.items():
            self.sessions[name] = open_session(graph, threads, providers)
            return_freed_memory()  # what packing took
        self.rows = _row_inputs(slots) if slots is not None else {}

    def open_context(self, length: int) -> OrtContext:
        """An empty context for up to `length` tokens."""
        return OrtContext(self.config, self.sessions, self.rows, length)

    def close(self) -> None:
        """Release the sessions."""
        self.sessions.clear()
        return_freed_memory()


class OrtContext:
    """KV buffers and bindings of one generation."""

    def __init__(
        self,
        config: ModelConfig,
        sessions: Mapping[str, ort.InferenceSession],
        rows: Arrays,
        length: int,
    ) -> None:
        self.length, self._config = length, config
        self._graphs = {name: _Bound(session) for name, session in sessions.items()}
        self._seqlens_k = np.zeros(1, np.int32)
        self._total_length = np.zeros((), np.int32)
        self._position, self._capacity, self._last_count = 0, 0, 0
        self._shape = (-1, False)  # tokens, and whether of a prompt, of the arrays bound now
        width = io.head_width(config)
        padding = ((0, 0), (0, (width - config.head_dim) // 2))
        cos, sin = (np.pad(table, padding) for table in rope_tables(config, length))
        fixed: Arrays = {
            io.ROPE_COS: cos,
            io.ROPE_SIN: sin,
            io.SEQLENS_K: self._seqlens_k,
            io.TOTAL_LENGTH: self._total_length,
        }
        for graph in self._graphs.values():
            graph.bind(rows | fixed)
        self._kv: dict[str, npt.NDArray[Any]] = {}

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
        self._grow(position + count + 1)  # a prompt makes room for the first decode step, too
        self._bind_tokens(count, prefill and io.PREFILL in self._graphs)
        self._token_ids[0] = token_ids
        self._total_length[...] = position + count
        self._seqlens_k[0] = position + count - 1
        if max(count, self._last_count) > 1:
            return_freed_memory()  # what the activations of the last prompt chunk took
        self._last_count = count
        for name in self._before_rows:
            self._run(name)

    def finish(self, slot_ids: npt.NDArray[np.int32], logits: int, top: int = 0) -> F32:
        """See BackendContext.finish; all logits are here in any case."""
        self._slot_ids[0] = slot_ids
        for name in self._after_rows:
            self._run(name)
        if not logits:
            return np.empty((0, self._config.vocab_size), np.float32)
        if self._logits.shape[1] != logits:
            self._bind_logits(logits)
        self._run(io.HEAD)
        return check_logits(self._logits[0], self._position + len(slot_ids) - logits)

    def _run(self, name: str) -> None:
        try:
            self._graphs[name].run()
        except Exception as error:  # see open_session
            check_memory(error, f"for the backbone ({name}) at position {self._position}")
            raise BackendError(
                f"the backbone ({name}) failed at position {self._position}: {reason(error)}; {DAMAGED}"
            ) from error

    def _bind_tokens(self, count: int, prefill: bool) -> None:
        if self._shape == (count, prefill):
            return
        present = [name for name in (io.EARLY, io.LATE) if name in self._graphs]
        layers = [io.PREFILL] if prefill else present
        self._before_rows = [io.EMBED, *(name for name in layers if name == io.EARLY)]
        self._after_rows = [name for name in layers if name != io.EARLY]
        self._token_ids = np.zeros((1, count), np.int64)
        self._slot_ids = np.zeros((1, count), np.int64)
        ids: Arrays = {io.TOKEN_IDS: self._token_ids, io.SLOT_IDS: self._slot_ids}
        hidden: Arrays = {}
        for name in (io.EMBED, *layers):
            output = np.empty((1, count, self._config.dim), np.float32)
            self._graphs[name].bind(ids | hidden | {io.NEW + io.HIDDEN: output})
            hidden = {io.HIDDEN: output}
        self._last_hidden = hidden[io.HIDDEN]
        self._logits = np.empty((1, 0, 0), np.float32)
        self._shape = (count, prefill)

    def _bind_logits(self, logits: int) -> None:
        self._logits = np.empty((1, logits, self._config.vocab_size), np.float32)
        wanted = self._last_hidden[:, self._last_hidden.shape[1] - logits :]
        self._graphs[io.HEAD].bind({io.HIDDEN: wanted, io.LOGITS: self._logits})

    def _grow(self, tokens: int) -> None:
        """Make room for so many tokens in the KV cache, layer by layer."""
        tokens = min(tokens, self.length)
        if tokens <= self._capacity:
            return
        capacity = grown_capacity(self._capacity, tokens, self.length)
        for name, grown in grow_kv(self._config, self._kv, self._capacity, capacity):
            for graph in self._graphs.values():
                graph.bind({name: grown, io.NEW + name: grown})
        self._capacity = capacity  # last: where memory ran out, the next step begins this anew


def grown_capacity(before: int, tokens: int, length: int) -> int:
    """Tokens that a KV cache will have room for, so that it holds `tokens` of up to `length`."""
    return min(length, max(2 * before, -(-tokens // KV_STEP) * KV_STEP))


def grow_kv(
    config: ModelConfig, kv: Arrays, before: int, capacity: int
) -> Iterator[tuple[str, F32]]:
    """Give each array of `kv` room for `capacity` tokens, one by one; the first `before` stay."""
    shape = (1, config.n_kv_heads, capacity, io.head_width(config))
    for layer in range(config.n_layers):
        for name in (f"{io.KEYS}{layer}", f"{io.VALUES}{layer}"):
            grown = own_pages(shape, np.float32)
            if before:
                grown[:, :, :before] = kv[name][:, :, :before]
            kv[name] = grown
            yield name, grown


class _Bound:
    """A session, and the arrays that its inputs and outputs are."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session, self._binding = session, session.io_binding()
        self._inputs = {value.name for value in session.get_inputs()}
        self._outputs = {value.name for value in session.get_outputs()}
        self._kept: dict[str, ort.OrtValue] = {}  # keeps alive what the binding points to

    def bind(self, arrays: Arrays) -> None:
        """Bind by reference those that this graph has: what is written to them later is read."""
        for name, array in arrays.items():
            if name in self._inputs:
                self._kept[name] = ort.OrtValue.ortvalue_from_numpy(array)
                self._binding.bind_ortvalue_input(name, self._kept[name])
            elif name in self._outputs:
                self._kept[name] = ort.OrtValue.ortvalue_from_numpy(array)
                self._binding.bind_ortvalue_output(name, self._kept[name])

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding)


def _row_inputs(slots: ArraySlots) -> Arrays:
    """The slots of the row cache as graph inputs, in the shapes of the rows' parts."""
    layout = slots.layout
    arrays: dict[str, npt.NDArray[Any]] = {}
    for index, layer in enumerate(layout.layers):
        for part in range(len(layout.parts)):
            codes, shape = slots.codes[index][part], layout.codes_shape(part)
            arrays[io.row_codes(layer, part)] = codes.reshape(slots.count, *shape)
            if layout.quantized:
                scales, shape = slots.scales[index][part], layout.scales_shape(part)
                arrays[io.row_scales(layer, part)] = scales.reshape(slots.count, *shape)
    if layout.quantized:
        arrays[io.ROW_ZERO_POINTS] = layout.zero_points(slots.count)
    return arrays
