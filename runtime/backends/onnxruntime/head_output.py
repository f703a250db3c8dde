"""What a step brings to the host: logits of the tokens wanted, or the largest of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnxruntime as ort

from stem_edge.graph import names as io
from stem_edge.numerics.quantize import F32, I64
from stem_edge.runtime.backends.interface import check_logits
from stem_edge.runtime.backends.onnxruntime.loaded import Loaded
from stem_edge.runtime.backends.onnxruntime.providers.session import BoundSession

from_numpy = ort.OrtValue.ortvalue_from_numpy


def outputs(graphs: Mapping[str, BoundSession], loaded: Loaded) -> dict[str, HeadOutput]:
    """Return what gives logits, by the name of its last graph: `step`, if there is one, and `head`."""
    return {name: HeadOutput(name, graphs, loaded) for name in (io.STEP, io.HEAD) if name in graphs}


class HeadOutput:
    """Layers for the wanted positions only, the head, and the logits that it brings to the host.

    name: `head`, or that of a graph of all layers with the head, such as `step`.
    """

    def __init__(self, name: str, graphs: Mapping[str, BoundSession], loaded: Loaded) -> None:
        self.name, self.has_layers = name, name != io.HEAD
        self._head, self._top = graphs[name], graphs.get(io.TOP)
        self._rest = None if self.has_layers else graphs.get(io.REST)
        self.first = name if self._rest is None else io.REST  # graph that takes the hidden states
        self._memory, self._vocab_size = loaded.memory, loaded.config.vocab_size
        self._takes_wanted = not loaded.windowed  # whether `rest` takes slots of these tokens alone
        self._width, self._dtype = loaded.config.hidden_width, loaded.dtype
        self._bound: tuple[int, int] | None = None  # tokens, and how many of their largest logits
        self._logits: F32 = np.empty((0, 0), np.float32)
        self.states: F32 = np.empty((0, 0, 0), np.float32)  # of these tokens, for an assistant
        self._largest: F32 | None = None  # logits, if only these are brought to the host
        self._set = np.zeros((0, 0), np.int64)  # ids with logits other than -inf

    def forget(self) -> None:
        """Bind again before the next run, because the hidden states are other arrays."""
        self._bound = None

    def bind(self, slot_ids: I64, places: range, top: int) -> None:
        """Bind memory for these tokens of a step with slots [B, T], unless that is bound."""
        top = 0 if self._top is None or top >= self._vocab_size else top
        if self._bound != (len(places), top):
            self._bound = None  # so that the next step binds again if memory runs out here
            self._bind_places(slot_ids, places)
            self._bind_logits((len(slot_ids), len(places), self._vocab_size), top)
            if io.STATES in self._head.outputs:
                self.states = np.empty((len(slot_ids), len(places), self._width), np.float32)
                self._head.bind({io.STATES: from_numpy(self.states)})
            self._bound = len(places), top

    def run(self) -> None:
        """Compute what was bound. Raises what onnxruntime raises."""
        if self._rest is not None:
            self._rest.run()
        self._head.run()
        if self._top is not None and self._largest is not None:
            self._top.run()

    def logits(self, positions: Sequence[int], skipped: int = 0) -> F32:
        """Return logits [n - skipped, V] of the n that are bound, for tokens at these positions [n].

        skipped: of the first, how many are not wanted. Raises NotFiniteError.
        """
        found = self._logits if self._largest is None else self._largest
        for n in range(skipped, len(positions)):
            check_logits(found[n : n + 1], positions[n])
        if self._largest is not None:
            np.put_along_axis(self._logits, self._set, -np.inf, 1)
            self._set = self._ids.copy()
            np.put_along_axis(self._logits, self._set, self._largest, 1)
        return self._logits[skipped:]

    def _bind_places(self, slot_ids: I64, places: range) -> None:
        wanted = np.array(places, np.int64)
        if self._rest is not None:
            shape = (len(slot_ids), len(places), self._width)
            hidden = self._memory.empty(shape, self._dtype, "hidden states").value()
            self._rest.bind({io.WANTED: from_numpy(wanted), io.NEW + io.HIDDEN: hidden})
            if self._takes_wanted:
                self._rest.feed({io.SLOT_IDS: slot_ids[:, places.start :]})
            self._head.bind({io.HIDDEN: hidden})
            wanted = np.arange(len(places))  # all, because `rest` computes no others
        self._head.bind({io.WANTED: from_numpy(wanted)})

    def _bind_logits(self, shape: tuple[int, int, int], top: int) -> None:
        lines, chosen = shape[0] * shape[1], (*shape[:2], top)
        if self._top is None or not top:
            self._logits, self._largest = np.empty((lines, shape[2]), np.float32), None
            self._head.bind({io.LOGITS: from_numpy(self._logits.reshape(shape))})
            return
        on_device = self._memory.empty(shape, np.float32, "logits").value()
        self._head.bind({io.LOGITS: on_device})
        self._largest, self._ids = (
            np.empty((lines, top), np.float32),
            np.empty((lines, top), np.int64),
        )
        host = {
            io.TOP_LOGITS: self._largest.reshape(chosen),
            io.TOP_IDS: self._ids.reshape(chosen),
            io.COUNT: np.array([top], np.int64),
        }
        self._top.bind({io.LOGITS: on_device} | {n: from_numpy(a) for n, a in host.items()})
        self._logits = np.full((lines, shape[2]), -np.inf, np.float32)
        self._set = np.zeros((lines, 0), np.int64)
