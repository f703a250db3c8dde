"""Computes the logits of a step, only for the tokens whose logits are requested."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stem_edge.graph import names as io
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.onnxruntime.loaded import Loaded, empty, from_numpy
from stem_edge.runtime.backends.onnxruntime.providers.session import BoundSession


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
        self._widths = {io.LOGITS: loaded.config.vocab_size}
        if io.STATES in self._head.outputs:
            self._widths[io.STATES] = loaded.config.hidden_width
        self._width = loaded.config.hidden_width
        self._places: range | None = None  # indices of the tokens whose inputs are bound

    def forget(self) -> None:
        """Make the next run bind all inputs again, because hidden states are now in other arrays."""
        self._places = None

    def run(self, sequences: int, places: range, results: dict[str, F32]) -> None:
        """Compute logits and, for an assistant, hidden states: arrays [sequences, len(places), width] in `results`.

        places: indices, in each sequence's step, of the tokens with logits. results: those of an earlier step,
        whose arrays are used again if they have this shape, because new pages of a large array take long.
        """
        if self._places != places:
            self._places = None  # for the next step, if memory runs out here
            self._bind_places(sequences, places)
            self._places = places
        for name, width in self._widths.items():
            shape = sequences, len(places), width
            if name not in results or results[name].shape != shape:
                results[name] = np.empty(shape, np.float32)
        self._head.lend({name: from_numpy(array) for name, array in results.items()})
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
