"""The graphs of a backbone over memory that is bound once, for a context or a batch.

Hidden states, rows and logits lie where the graphs compute. Arrays sized by sequences and tokens of
a step are bound again when these change, which they seldom do while decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from stem_edge.errors import BackendError
from stem_edge.graph import names as io
from stem_edge.numerics.quantize import F32, I64
from stem_edge.runtime.backends.onnxruntime.head_output import HeadOutput, outputs
from stem_edge.runtime.backends.onnxruntime.loaded import Loaded, empty, from_numpy
from stem_edge.runtime.backends.onnxruntime.providers.provider import ort
from stem_edge.runtime.backends.onnxruntime.providers.session import (
    BoundSession,
)


class BoundShape(NamedTuple):
    """Sequences and tokens that the bound arrays are for."""

    sequences: int = 0  # with the empty one
    tokens: int = 0  # of each
    prefill: bool = False  # by the graph for prompts
    apart: bool = False  # by a graph that gives each token the bits of a step of its own
    first: int = 0  # place of the first sequence in the KV cache

    @property
    def output(self) -> str:
        """The graph that gives logits, unless all steps end with the same."""
        step = io.apart_step(self.tokens) if self.apart else io.STEP
        return io.HEAD if self.prefill else step


class BoundGraphs:
    """Runs steps of up to `length` tokens of context. Raises OutOfMemoryError.

    kv: returns the KV cache of sequences from a place on, as inputs and outputs of graphs.
    Kernels compute products of rows two at a time, and some round an unpaired row differently. So a step of
    one token may have an empty sequence beside it (`padded`), which writes to the place after the last one.
    """

    def __init__(
        self, loaded: Loaded, length: int, kv: Callable[[int, int], Mapping[str, ort.OrtValue]]
    ) -> None:
        self._loaded, self._kv = loaded, kv
        self._kv_parts = dict[
            str, tuple[int, int]
        ]()  # graph -> first and number of bound sequences
        self._width, self._vocab_size = loaded.config.hidden_width, loaded.config.vocab_size
        self._values = dict[str, ort.OrtValue]()  # bound in all graphs that have them
        self.graphs = {
            name: BoundSession(session)
            for name, session in loaded.sessions.items()
            if name != io.ASSISTANT
        }
        self.bind(loaded.slots)
        self.ropes = loaded.ropes.upto(length)
        self.bind(self.ropes.values())
        self._outputs = outputs(self.graphs, loaded)
        self._output = next(iter(self._outputs.values()))
        self.shape = BoundShape()
        self._begins: list[int] = []  # positions of the step
        # Of the latest tokens with logits, and the position of the first.
        self._states: tuple[F32, int] = np.empty((1, 0, 0), np.float32), 0
        self._stream = loaded.stream

    def bind(self, values: Mapping[str, ort.OrtValue]) -> None:
        """Bind inputs and outputs in all graphs that have them, also in graphs that are opened later."""
        self._values |= values
        for graph in self.graphs.values():
            graph.bind(values)

    def _later(self, name: str) -> bool:
        """Tell whether there is a graph, which is opened when it is first needed."""
        if name not in self.graphs and (sessions := self._loaded.later.find(name)):
            for one, session in sessions.items():
                self.graphs[one] = BoundSession(session)
                self.graphs[one].bind(self._values)
            last = io.HEAD if name == io.PREFILL else name
            self._outputs[last] = HeadOutput(last, self.graphs, self._loaded)
        return name in self.graphs

    def _prompts(self) -> bool:
        """Tell whether there is a graph for prompts; without it, those that decode take them."""
        try:
            return self._later(io.PREFILL)
        except BackendError:
            return False

    def rest(self) -> None:
        """Free what steps have taken; graphs that were opened later have logits of their own."""
        for name in self.graphs.keys() - self._loaded.sessions.keys():
            del self.graphs[name]
            self._kv_parts.pop(name, None)
        for name in self._outputs.keys() - self.graphs.keys():
            del self._outputs[name]
        if self.shape.tokens > 1 or self.shape.prefill:
            self.allocate(BoundShape(1, 1))

    def begin(
        self,
        token_ids: I64,
        positions: list[int],
        dropped: list[int],
        *,
        first: int = 0,
        padded: bool = False,
        prefill: bool = False,
        apart: bool = False,
    ) -> None:
        """Start a step of ids [B, T], with the layers before any row.

        positions [B]: of each sequence's first token in the step. dropped [B]: number of tokens of each
        sequence that have left the windows. first: place of the first sequence in the KV cache. padded: add an
        empty sequence. prefill, apart: by these graphs, if the backbone has them.
        """
        (sequences, count), prefill = token_ids.shape, prefill and self._prompts()
        apart = apart and count > 1 and self._stream is None  # which follows single steps alone
        apart = apart and self._later(io.apart_step(count))
        shape = BoundShape(sequences + padded, count, prefill, apart, first)
        if shape != self.shape:
            self.allocate(shape)
        self._begins, ends = positions, [position + count for position in positions]
        ends, dropped = ends + [1] * padded, dropped + [0] * padded
        self.ropes.fill(max(ends))
        self._token_ids[:sequences] = token_ids
        self._lengths[""].write(ends)
        if self._has_windows:
            rows = [end - gone for end, gone in zip(ends, dropped, strict=True)]
            self._lengths[io.WINDOW].write(rows)
            for line, position in zip(self._positions, positions, strict=False):
                np.add(self._range, position, out=line)
        for name in self._before_rows:
            self._run(name, self.graphs[name].run)

    def finish(self, slot_ids: npt.NDArray[np.integer[Any]], wanted: int) -> F32:
        """Complete the step; return logits [B * wanted, V] of the last tokens of each sequence."""
        if self.shape.sequences > len(self._begins):
            slot_ids = np.concatenate([slot_ids, slot_ids[-1:]])
        if self._row_shares is None:
            self._slot_ids[...] = slot_ids
        else:
            from stem_edge.tables.windows import spread  # for models with windows of rows alone

            self._slot_ids[...], self._row_shares[:, :-1] = spread(slot_ids)
        count = max(wanted, 1) if self._output.has_layers else wanted
        places = range(self.shape.tokens - count, self.shape.tokens)
        with nullcontext() if self._stream is None else self._stream.step():
            self._complete(places)
        if not wanted:
            return np.empty((0, self._vocab_size), np.float32)
        positions = [begin + n for begin in self._begins for n in places]
        return self._output.logits(positions)[: len(positions)]

    def _complete(self, places: range) -> None:
        for name in self._after_rows:
            self._run(name, self.graphs[name].run)
        if places:
            self._output.bind(self.shape.sequences, places)
            self._run(self._output.name, self._output.run)
            self._states = self._output.states, self._begins[0] + places.start

    def state_before(self, position: int) -> F32:
        """Return the state [dim] of the token before a position, one of those with logits in the last step."""
        states, first = self._states
        if not 0 <= (place := position - 1 - first) < states.shape[1]:
            raise BackendError(
                f"the last step left no state of the token before position {position}"
            )
        state: F32 = states[0, place]
        return state

    def allocate(self, shape: BoundShape) -> None:
        """Bind hidden states for such steps, an array for each graph's output."""
        names = [io.EMBED, *self._layers(shape.prefill)]
        # Allocate all before binding any, so that nothing has changed if memory runs out.
        values = [self._hidden(shape) for _ in names]
        self.shape = BoundShape()
        self._output = self._outputs.get(shape.output, self._output)
        self._output.forget()
        last = self._output.first
        for name in {*names, last, self._output.name}:
            self._bind_kv(name, shape)
        for name, value, following in zip(names, values, [*names[1:], last], strict=True):
            self.graphs[name].bind({io.NEW + io.HIDDEN: value})
            self.graphs[following].bind({io.HIDDEN: value})
        self.graphs[last].bind({io.EMBEDDED: values[0]})
        self._feed_step(shape)
        self._before_rows = [name for name in names if name in (io.EMBED, io.EARLY)]
        self._after_rows = names[len(self._before_rows) :]
        self.shape = shape

    def _bind_kv(self, name: str, shape: BoundShape) -> None:
        if self._kv_parts.get(name) != (part := (shape.first, shape.sequences)):
            self._kv_parts.pop(name, None)  # so that the next step binds again if this fails
            self.graphs[name].bind(self._kv(*part))
            self._kv_parts[name] = part

    def _hidden(self, shape: BoundShape) -> ort.OrtValue:
        what = f"the hidden states of {shape.sequences * shape.tokens:,} tokens"
        return from_numpy(empty((shape.sequences, shape.tokens, self._width), np.float32, what))

    def _layers(self, prefill: bool) -> list[str]:
        names = (io.PREFILL,) if prefill else (io.EARLY, io.LATE)
        return [name for name in names if name in self.graphs]

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
        try:
            run()
        except Exception as error:  # because onnxruntime's exceptions share no base class
            from stem_edge.runtime.backends.onnxruntime.providers.errors import raise_error

            at = ", ".join(map(str, self._begins))
            raise_error(error, f"for the backbone ({name}) at position {at}")


class Lengths:
    """Inputs that say how many rows of the KV cache are filled, this step's included."""

    def __init__(self, sequences: int) -> None:
        self._seqlens_k, self._total = np.zeros(sequences, np.int32), np.zeros((), np.int32)

    def inputs(self, prefix: str) -> dict[str, npt.NDArray[np.int32]]:
        return {prefix + io.SEQLENS_K: self._seqlens_k, prefix + io.TOTAL_LENGTH: self._total}

    def write(self, rows: list[int]) -> None:
        for place, count in enumerate(rows):
            self._seqlens_k[place] = count - 1
        self._total[...] = max(rows)
