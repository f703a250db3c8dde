"""Logits of a step: the last layers, the head, and what of it is brought to the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime as ort

from stem_edge.graph import names as io
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import check_logits
from stem_edge.runtime.backends.onnxruntime.providers.session import BoundSession

if TYPE_CHECKING:
    from stem_edge.runtime.backends.onnxruntime.backend import OrtBackend

from_numpy = ort.OrtValue.ortvalue_from_numpy


def outputs(graphs: Mapping[str, BoundSession], backend: OrtBackend) -> dict[str, Output]:
    """Return what gives logits, by the name of its last graph: `step`, if there is one, and `head`."""
    return {name: Output(name, graphs, backend) for name in (io.STEP, io.HEAD) if name in graphs}


class Output:
    """Layers for the wanted positions only, the head, and the logits that it brings to the host.

    name: `head`, or `step` for a graph of all layers with the head.
    """

    def __init__(self, name: str, graphs: Mapping[str, BoundSession], backend: OrtBackend) -> None:
        self.name, self.has_layers = name, name == io.STEP
        self._head, self._top = graphs[name], graphs.get(io.TOP)
        self._rest = None if self.has_layers else graphs.get(io.REST)
        self.first = name if self._rest is None else io.REST  # graph that takes the hidden states
        self._memory, self._vocab_size = backend.memory, backend.config.vocab_size
        self._width, self._dtype = backend.config.hidden_width, backend.dtype
        self._bound: tuple[int, int] | None = None  # tokens, and how many of their largest logits
        self._logits: F32 = np.empty((0, 0), np.float32)
        self._set = np.zeros((0, 0), np.int64)  # ids whose logits are not -inf

    def forget(self) -> None:
        """Bind again before the next run, because the hidden states are other arrays."""
        self._bound = None

    def bind(self, sequences: int, count: int, wanted: int, top: int) -> None:
        """Bind memory for the last of `count` tokens of each sequence, unless that is bound."""
        top = 0 if self._top is None or top >= self._vocab_size else top
        if self._bound != (wanted, top):
            self._bound = None  # so that the next step binds anew if memory runs out here
            self._bind_positions(sequences, count, wanted)
            self._bind_logits((sequences, wanted, self._vocab_size), top)
            self._bound = wanted, top

    def run(self) -> None:
        """Compute what was bound. Raises what onnxruntime raises."""
        if self._rest is not None:
            self._rest.run()
        self._head.run()
        if self._top is not None and self._bound and self._bound[1]:
            self._top.run()

    def logits(self, positions: Iterable[int]) -> F32:
        """Return logits [n, V] of all that are bound, which are for tokens at these positions.

        Raises NotFiniteError.
        """
        top = self._bound is not None and self._bound[1] > 0
        for found, position in zip(self._largest if top else self._logits, positions, strict=True):
            check_logits(found[None], position)
        if top:
            np.put_along_axis(self._logits, self._set, -np.inf, 1)
            self._set = self._ids[0].copy()
            np.put_along_axis(self._logits, self._set, self._largest, 1)
        return self._logits

    def _bind_positions(self, sequences: int, count: int, wanted: int) -> None:
        places = np.arange(count - wanted, count, dtype=np.int64)
        if self._rest is not None:
            shape = (sequences, wanted, self._width)
            hidden = self._memory.empty(shape, self._dtype, "hidden states").value()
            self._rest.bind({io.WANTED: from_numpy(places), io.NEW + io.HIDDEN: hidden})
            self._head.bind({io.HIDDEN: hidden})
            places = np.arange(wanted)  # all, because `rest` computes no others
        self._head.bind({io.WANTED: from_numpy(places)})

    def _bind_logits(self, shape: tuple[int, int, int], top: int) -> None:
        (sequences, wanted, size), lines = shape, shape[0] * shape[1]
        if self._top is None or not top:
            logits = np.empty(shape, np.float32)
            self._head.bind({io.LOGITS: from_numpy(logits)})
            self._logits = logits.reshape(lines, size)
            return
        on_device = self._memory.empty(shape, np.float32, "logits").value()
        self._head.bind({io.LOGITS: on_device})
        largest = np.empty((sequences, wanted, top), np.float32)
        self._ids = np.empty((sequences, wanted, top), np.int64)
        host = {
            io.TOP_LOGITS: largest,
            io.TOP_IDS: self._ids,
            io.COUNT: np.array([top], np.int64),
        }
        self._top.bind({io.LOGITS: on_device} | {n: from_numpy(a) for n, a in host.items()})
        self._largest = largest.reshape(lines, top)
        self._logits = np.full((lines, size), -np.inf, np.float32)
        self._set = np.zeros((lines, 0), np.int64)
