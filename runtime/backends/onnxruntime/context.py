"""A generation on the graphs for the CPU, or on those for devices: its KV cache, and its steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.interface import MOST, Resumes
from stem_edge.runtime.backends.onnxruntime.bound_graphs import BoundGraphs, Shape
from stem_edge.runtime.backends.onnxruntime.kv_arrays import KvArrays
from stem_edge.runtime.backends.onnxruntime.loaded import Loaded
from stem_edge.system.memory import return_freed_memory

# A step of no more, as when guesses are verified, leaves too little behind to look for.
FEW_TOKENS = MOST


class OrtContext:
    """KV cache and hidden states of one generation.

    After it is dropped, the next call to the backend frees its memory on a device.
    """

    def __init__(self, loaded: Loaded, length: int) -> None:
        self._memory, self.length = loaded.memory, length
        self._windowed = loaded.windowed
        half = loaded.kv.dtype == np.float16
        self._rounds_by_step = half or loaded.config.n_experts > 0
        self._owned: list[object] = []
        self.kv = KvArrays(loaded, 1, length)  # first, so that lack of memory shows at once
        self._owned.append(self.kv)
        self.window = self.kv.window()
        self._graphs = BoundGraphs(loaded, length)
        self._owned.append(self._graphs)
        self._graphs.bind(self.kv.values())
        self._filled = 0  # tokens computed so far

    def __del__(self) -> None:
        self._memory.retire(self._owned)  # not freed here: this may be any thread

    @property
    def nbytes(self) -> int:
        """Bytes that the KV cache takes so far; on a device, all of it from the beginning."""
        return self.nbytes_of(self.length if self._memory.kind == "device" else self._filled)

    def nbytes_of(self, tokens: int) -> int:
        return self.kv.nbytes_of(tokens)

    @property
    def earliest(self) -> int:
        return self.window.earliest

    def resumes(self, tokens: int) -> Resumes:
        """Go on by pairs, unless rounding follows from the tokens of a step or a window drops some.

        It does with experts, which compute their tokens together, and in attention over float16.

        Nowhere on a device or with its graphs, where memory is taken at once.
        """
        if not self._windowed:
            return ""
        dropped = self.settled or tokens > self.window.capacity
        return "steps" if dropped or self._rounds_by_step else "pairs"

    @property
    def settled(self) -> int:
        return self.window.settled

    def rest(self) -> None:
        if self._graphs.shape.tokens > 1:
            self._graphs.allocate(Shape(1, 1))

    def kept(self, tokens: int) -> list[npt.NDArray[Any]]:
        """Return views [heads, tokens, width]."""
        if self.earliest or any(array.shape[2] < tokens for array in self.kv.arrays):
            return []
        return [array.host[0, :, :tokens] for array in self.kv.arrays]

    def restore(self, arrays: Iterable[npt.NDArray[Any]], tokens: int) -> None:
        for view, array in zip(self.kept(tokens), arrays, strict=True):
            view[...] = array
        self._filled = max(self._filled, tokens)

    def begin(
        self, token_ids: npt.NDArray[np.int64], position: int, *, prefill: bool = False
    ) -> None:
        count, total = len(token_ids), position + len(token_ids)
        self._memory.collect()
        dropped = self.window.make_room(position, count)
        self._filled = max(self._filled, total)
        if max(count, self._graphs.shape.tokens) > FEW_TOKENS:
            return_freed_memory()  # otherwise a prompt chunk's activations stay with this process
        self._graphs.begin(token_ids[None], [position], [dropped], prefill=prefill)

    def finish(self, slot_ids: npt.NDArray[np.int32], logits: int, top: int = 0) -> F32:
        """Complete a step; only a device gives no more than the `top` largest logits."""
        return self._graphs.finish(slot_ids[None], logits, top)
