"""The graphs of a backbone, and the memory that their inputs and outputs are bound to.

Memory is bound again only if a step has another shape or other contexts, seldom while decoding.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stem_edge.errors import BackendError
from stem_edge.graph import names as io
from stem_edge.numerics.quantize import F32, I32, I64
from stem_edge.runtime.backends.onnxruntime.context import KvArrays, OrtContext
from stem_edge.runtime.backends.onnxruntime.head_output import HeadOutput
from stem_edge.runtime.backends.onnxruntime.loaded import Loaded, RopeArrays, empty, from_numpy
from stem_edge.runtime.backends.onnxruntime.providers import ort
from stem_edge.runtime.backends.onnxruntime.providers.session import (
    BoundSession,
    onnxruntime_errors,
)


class BoundShape(NamedTuple):
    """Shape of the steps for which arrays are bound as inputs and outputs of the graphs.

    apart: the graph gives each token of a step the same bits as a step of one token.
    """

    sequences: int = 0  # including an empty sequence, if one is added
    tokens: int = 0  # of each
    prefill: bool = False  # run by the prefill graph
    apart: bool = False

    @property
    def output(self) -> str:
        """Name (graph/names.py) of the graph that computes logits, if the backbone has several such graphs."""
        step = io.apart_step(self.tokens) if self.apart else io.STEP
        return io.HEAD if self.prefill else step


class BoundGraphs:
    """Runs steps of one or several contexts. Raises OutOfMemoryError.

    Kernels multiply two tokens at a time, and some round an unpaired token differently. So an empty sequence
    (`padded`) can be added to a step of an odd number of tokens. Its KV cache follows that of the last sequence.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._loaded, self._stream = loaded, loaded.stream
        # graph -> keys and values that are bound, by the first place and the number of places
        self._kv_parts = dict[str, tuple[weakref.ref[KvArrays], int, int]]()
        self._width, self._vocab_size = loaded.config.hidden_width, loaded.config.vocab_size
        self._values = dict[str, ort.OrtValue]()  # bound in all graphs that have them
        self.graphs = {
            name: BoundSession(session)
            for name, session in loaded.sessions.items()
            if name != io.ASSISTANT
        }
        self.bind(loaded.slots)
        self.ropes = RopeArrays(loaded.config, 0)
        last = [name for name in (io.STEP, io.HEAD) if name in self.graphs]
        self._outputs = {name: HeadOutput(name, self.graphs, loaded) for name in last}
        self._output = next(iter(self._outputs.values()))
        self.shape = BoundShape()
        self._contexts: Sequence[OrtContext] = ()  # of the current step; so are `_begins`
        self._begins: Sequence[int] = ()

    def lengthen(self, length: int) -> None:
        """Allocate RoPE tables for contexts of up to `length` tokens, if the present tables are shorter."""
        if length > self.ropes.length:
            self.ropes = RopeArrays(self._loaded.config, length)
            self.bind(self.ropes.values())

    def bind(self, values: Mapping[str, ort.OrtValue]) -> None:
        """Bind values by name to inputs and outputs of all graphs, also those opened later."""
        self._values |= values
        for graph in self.graphs.values():
            graph.bind(values)

    def _later(self, name: str) -> bool:
        """Open the optional graph `name` if it is not open yet; return False if the backbone lacks it."""
        if name not in self.graphs and (sessions := self._loaded.later.find(name)):
            for one, session in sessions.items():
                self.graphs[one] = BoundSession(session)
                self.graphs[one].bind(self._values)
            last = io.HEAD if name == io.PREFILL else name
            self._outputs[last] = HeadOutput(last, self.graphs, self._loaded)
        return name in self.graphs

    def _prompts(self) -> bool:
        """Open the graph for prompts if it is not open yet; return False if there is none or opening fails."""
        try:
            return self._later(io.PREFILL)
        except BackendError:
            return False

    def begin(
        self,
        contexts: Sequence[OrtContext],
        token_ids: I64,
        positions: Sequence[int],
        dropped: list[int],
        padded: bool,
        *,
        prefill: bool = False,
        apart: bool = False,
    ) -> None:
        """Start a step of token ids [B, T]: run the layers before the first one that uses rows.

        positions [B]: position of each sequence's first token in the step. dropped [B]: how many tokens of
        each sequence have left the windows. padded: add an empty sequence. prefill, apart: use the graphs for
        prompts, or for steps of several tokens, if the backbone has them.
        """
        (sequences, count), prefill = token_ids.shape, prefill and self._prompts()
        apart = apart and count > 1 and self._stream is None  # streams follow single-token steps
        apart = apart and self._later(io.apart_step(count))
        shape = BoundShape(sequences + padded, count, prefill, apart)
        if shape != self.shape:
            self.allocate(shape)
        self._bind_kv(*contexts[0].place)
        self._contexts, self._begins = contexts, positions
        ends = [position + count for position in positions] + [1] * padded
        if max(ends) > self.ropes.filled:
            self.ropes.fill(max(ends))
        self._token_ids[:sequences] = token_ids
        self._lengths[""].write(ends)
        if self._has_windows:
            gone = dropped + [0] * padded
            rows = [end - before for end, before in zip(ends, gone, strict=True)]
            self._lengths[io.WINDOW].write(rows)
            for line, position in zip(self._positions, positions, strict=False):
                np.add(self._range, position, out=line)
        for name in self._before_rows:
            self._run(name, self.graphs[name].run)

    def finish(self, slot_ids: I32, wanted: int) -> F32:
        sequences, tokens = len(self._begins), self.shape.tokens
        slots = slot_ids.reshape(sequences, -1, *slot_ids.shape[1:])
        if self.shape.sequences > sequences:
            slots = np.concatenate([slots, slots[-1:]])
        if self._row_shares is None:
            self._slot_ids[...] = slots
        else:
            from stem_edge.tables.windows import spread  # only for models with a row window

            self._slot_ids[...], self._row_shares[:, :-1] = spread(slots)
        count = max(wanted, 1) if self._output.has_layers else wanted
        places = range(tokens - count, tokens)
        with nullcontext() if self._stream is None else self._stream.step():
            logits = self._completed(places)
        return logits[: sequences * wanted]

    def _completed(self, places: range) -> F32:
        for name in self._after_rows:
            self._run(name, self.graphs[name].run)
        if not places:
            return np.empty((0, self._vocab_size), np.float32)
        context = self._contexts[0]
        run = partial(self._output.run, self.shape.sequences, places, context.results)
        self._run(self._output.name, run)
        context.first_result = self._begins[0] + places.start
        return context.results[io.LOGITS].reshape(-1, self._vocab_size)

    def allocate(self, shape: BoundShape) -> None:
        """Allocate and bind hidden states for steps of this shape, an array for each graph's output."""
        layers = (io.PREFILL,) if shape.prefill else (io.EARLY, io.LATE)
        names = [name for name in (io.EMBED, *layers) if name in self.graphs]
        # Allocate all before binding any, so that nothing has changed if memory runs out.
        what = f"the hidden states of {shape.sequences * shape.tokens:,} tokens"
        size = shape.sequences, shape.tokens, self._width
        values = [from_numpy(empty(size, np.float32, what)) for _ in names]
        self.shape = BoundShape()
        self._output = self._outputs.get(shape.output, self._output)
        self._output.forget()
        last = self._output.first
        for name, value, following in zip(names, values, [*names[1:], last], strict=True):
            self.graphs[name].bind({io.NEW + io.HIDDEN: value})
            self.graphs[following].bind({io.HIDDEN: value})
        self.graphs[last].bind({io.EMBEDDED: values[0]})
        self._feed_step(shape)
        self._before_rows = [name for name in names if name in (io.EMBED, io.EARLY)]
        self._after_rows = names[len(self._before_rows) :]
        self._running = {*names, last, self._output.name}
        self.shape = shape

    def _bind_kv(self, kv: KvArrays, first: int) -> None:
        """Bind the step's KV cache: `kv`, from sequence `first` on. The caller keeps `kv` alive."""
        part = (weakref.ref(kv), first, self.shape.sequences)
        values: Mapping[str, ort.OrtValue] | None = None
        for name in self._running:
            if self._kv_parts.get(name) != part:
                self._kv_parts.pop(name, None)  # so that the next step binds again if this fails
                values = values or kv.part(first, self.shape.sequences)
                self.graphs[name].lend(values)
                self._kv_parts[name] = part

    def _feed_step(self, shape: BoundShape) -> None:
        arrays = np.zeros((3, shape.sequences, shape.tokens), np.int64)
        self._token_ids, self._slot_ids, self._positions = arrays
        if self._loaded.config.ngram_order:
            self._slot_ids = np.zeros((*arrays.shape[1:], self._loaded.config.lookups), np.int64)
        self._range = np.arange(shape.tokens)
        self._feed({io.TOKEN_IDS: self._token_ids, io.SLOT_IDS: self._slot_ids})
        self._feed({io.POSITIONS: self._positions})
        self._row_shares: F32 | None = None
        if window := self._loaded.config.row_window:
            sequences, tokens, rows = shape.sequences, shape.tokens, shape.tokens + window - 1
            self._slot_ids = np.zeros((sequences, rows), np.int64)
            self._row_shares = np.zeros((sequences, tokens + 1, rows), np.float32)
            self._feed({io.SLOT_IDS: self._slot_ids, io.ROW_SHARES: self._row_shares})
        self._has_windows = any(io.POSITIONS in graph.inputs for graph in self.graphs.values())
        self._lengths = {prefix: Lengths(shape.sequences) for prefix in ("", io.WINDOW)}
        for prefix, lengths in self._lengths.items():
            self._feed(lengths.inputs(prefix))

    def _feed(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        for graph in self.graphs.values():
            graph.feed(arrays)

    def _run(self, name: str, run: Callable[[], None]) -> None:
        at = ", ".join(map(str, self._begins))
        with onnxruntime_errors(f"for the backbone ({name}) at position {at}"):
            run()


class Lengths:
    """Graph inputs that say how many tokens each sequence's KV cache holds, including the step's own tokens."""

    def __init__(self, sequences: int) -> None:
        self._seqlens_k, self._total = np.zeros(sequences, np.int32), np.zeros((), np.int32)

    def inputs(self, prefix: str) -> dict[str, npt.NDArray[np.int32]]:
        return {prefix + io.SEQLENS_K: self._seqlens_k, prefix + io.TOTAL_LENGTH: self._total}

    def write(self, rows: list[int]) -> None:
        self._seqlens_k[:] = np.subtract(rows, 1)
        self._total[...] = max(rows)
