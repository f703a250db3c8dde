"""Logits of the tokens of a step that want any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from stem_edge.graph import names as io
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import check_logits
from stem_edge.runtime.backends.onnxruntime.loaded import Loaded, empty, from_numpy
from stem_edge.runtime.backends.onnxruntime.providers.session import BoundSession


def outputs(graphs: Mapping[str, BoundSession], loaded: Loaded) -> dict[str, HeadOutput]:
    """Return what gives logits, by the name of its last graph: `step`, if there is one, and `head`."""
    return {name: HeadOutput(name, graphs, loaded) for name in (io.STEP, io.HEAD) if name in graphs}


class HeadOutput:
    """Layers for the wanted positions only, the head, and its logits.

    name: `head`, or that of a graph of all layers with the head, such as `step`.
    """

    def __init__(self, name: str, graphs: Mapping[str, BoundSession], loaded: Loaded) -> None:
        self.name, self.has_layers = name, name != io.HEAD
        self._head = graphs[name]
        self._rest = None if self.has_layers else graphs.get(io.REST)
        self.first = name if self._rest is None else io.REST  # graph that takes the hidden states
        self._vocab_size, self._width = loaded.config.vocab_size, loaded.config.hidden_width
        self._bound: int | None = None  # tokens
        self._logits: F32 = np.empty((0, 0), np.float32)
        self.states: F32 = np.empty((0, 0, 0), np.float32)  # of these tokens, for an assistant

    def forget(self) -> None:
        """Bind again before the next run, because the hidden states are other arrays."""
        self._bound = None

    def bind(self, sequences: int, places: range) -> None:
        """Bind memory for these tokens of a step of each of some sequences, unless that is bound."""
        if self._bound != len(places):
            self._bound = None  # so that the next step binds again if memory runs out here
            self._bind_places(sequences, places)
            shape = (sequences, len(places), self._vocab_size)
            self._logits = np.empty((shape[0] * shape[1], shape[2]), np.float32)
            self._head.bind({io.LOGITS: from_numpy(self._logits.reshape(shape))})
            if io.STATES in self._head.outputs:
                self.states = np.empty((*shape[:2], self._width), np.float32)
                self._head.bind({io.STATES: from_numpy(self.states)})
            self._bound = len(places)

    def run(self) -> None:
        """Compute what was bound. Raises what onnxruntime raises."""
        if self._rest is not None:
            self._rest.run()
        self._head.run()

    def logits(self, positions: Sequence[int]) -> F32:
        """Return logits [n, V] of tokens at these positions [n]. Raises NotFiniteError."""
        for n, position in enumerate(positions):
            check_logits(self._logits[n : n + 1], position)
        return self._logits

    def _bind_places(self, sequences: int, places: range) -> None:
        wanted = np.array(places, np.int64)
        if self._rest is not None:
            shape = (sequences, len(places), self._width)
            hidden = from_numpy(empty(shape, np.float32, "hidden states"))
            self._rest.bind({io.WANTED: from_numpy(wanted), io.NEW + io.HIDDEN: hidden})
            self._head.bind({io.HIDDEN: hidden})
            wanted = np.arange(len(places))  # all, because `rest` computes no others
        self._head.bind({io.WANTED: from_numpy(wanted)})
