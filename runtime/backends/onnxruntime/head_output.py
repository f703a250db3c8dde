"""Computes the logits of a step, only for the tokens whose logits are requested."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from stem_edge.graph import names as io
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.onnxruntime.loaded import Loaded, empty, from_numpy
from stem_edge.runtime.backends.onnxruntime.providers.session import BoundSession


@dataclass
class StepOutputs:
    """Results of a step for the last n tokens of each sequence; `first` is their first position."""

    logits: F32 = field(default_factory=lambda: np.empty((0, 0), np.float32))  # [B * n, V]
    # [B, n, width], for an assistant
    states: F32 = field(default_factory=lambda: np.empty((0, 0, 0), np.float32))
    first: int = 0


def outputs(graphs: Mapping[str, BoundSession], loaded: Loaded) -> dict[str, HeadOutput]:
    """Return graph name -> HeadOutput, for the graphs that compute logits: `step` and `head` (graph/names.py)."""
    return {name: HeadOutput(name, graphs, loaded) for name in (io.STEP, io.HEAD) if name in graphs}


class HeadOutput:
    """Runs the last graphs of a step, which compute logits.

    name: `head` (final norm and logits), or a graph with all layers, such as `step`. The graph
    `rest` (layers that reuse an earlier layer's K and V), if there is one, runs before `head`.
    """

    def __init__(self, name: str, graphs: Mapping[str, BoundSession], loaded: Loaded) -> None:
        self.name, self.has_layers = name, name != io.HEAD
        self._head = graphs[name]
        self._rest = None if self.has_layers else graphs.get(io.REST)
        self.first = name if self._rest is None else io.REST  # graph that takes the hidden states
        self._vocab_size, self._width = loaded.config.vocab_size, loaded.config.hidden_width
        self._places: range | None = None  # indices of the tokens whose inputs are bound
        self._logits: weakref.ref[F32] | None = None  # the bound array

    def forget(self) -> None:
        """Make the next `bind` bind everything again, because hidden states are now in other arrays."""
        self._places = None

    def bind(self, sequences: int, places: range, to: StepOutputs) -> None:
        """Bind the arrays of `to` as outputs. places: indices, in each sequence's step, of the tokens with logits."""
        if self._places != places:
            self._places, self._logits = None, None  # for the next step, if memory runs out here
            self._bind_places(sequences, places)
            self._places = places
        shape = (sequences, len(places), self._vocab_size)
        if len(to.logits) != shape[0] * shape[1]:
            to.logits = np.empty((shape[0] * shape[1], shape[2]), np.float32)
            if io.STATES in self._head.outputs:
                to.states = np.empty((*shape[:2], self._width), np.float32)
        if self._logits is None or self._logits() is not to.logits:
            self._logits = None
            self._head.lend({io.LOGITS: from_numpy(to.logits.reshape(shape))})
            if io.STATES in self._head.outputs:
                self._head.lend({io.STATES: from_numpy(to.states)})
            self._logits = weakref.ref(to.logits)

    def run(self) -> None:
        """Run `rest` (see the class), if there is one, and then the graph that computes logits."""
        if self._rest is not None:
            self._rest.run()
        self._head.run()

    def _bind_places(self, sequences: int, places: range) -> None:
        wanted = np.array(places, np.int64)
        if self._rest is not None:
            shape = (sequences, len(places), self._width)
            hidden = from_numpy(empty(shape, np.float32, "hidden states"))
            self._rest.bind({io.WANTED: from_numpy(wanted), io.NEW + io.HIDDEN: hidden})
            self._head.bind({io.HIDDEN: hidden})
            wanted = np.arange(len(places))  # all, because `rest` computes no others
        self._head.bind({io.WANTED: from_numpy(wanted)})
