"""The KV cache of a sequence on the CPU, in arrays that the graphs read and write.

The system commits memory as it is written, so arrays can have room for the longest context. Layers with a
sliding window drop older tokens: the array's first rows hold the window in the order of positions, and a step
appends its tokens. Keys are rotated (RoPE) before they are stored, so graphs need only the number of rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy.typing as npt

from stem_edge.graph import names as io
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.costs import MOST
from stem_edge.runtime.backends.onnxruntime.loaded import Loaded, empty, from_numpy
from stem_edge.runtime.backends.onnxruntime.providers import ort
from stem_edge.system.memory import free_pages

if TYPE_CHECKING:
    from stem_edge.runtime.backends.interface import Resumes
    from stem_edge.runtime.backends.onnxruntime.kv_window import KvWindow


class KvArrays:
    """KV cache arrays [size, heads, rows, width] for `size` sequences of up to `length` tokens.

    Each layer has two arrays, each convolution has one. A sequence's place is its index on the first axis. pads: add
    a place for an empty sequence, which makes the number of tokens of a step even. Raises OutOfMemoryError.
    """

    def __init__(self, loaded: Loaded, size: int, length: int, *, pads: bool) -> None:
        config, self.length = loaded.config, length
        self.pads, self.taken = pads, 0  # taken: number of places in use
        size += pads
        self.arrays: list[npt.NDArray[Any]] = []
        self._names = list[list[str]]()
        # An assistant's window begins one token earlier, because it ends before the newest token.
        self._window = config.sliding_window + (io.ASSISTANT in loaded.sessions)
        for number in range(config.own_kv_layers):
            layer = config.layer(number)
            rows = io.kv_capacity(layer.window, length)
            shape = (size, layer.n_kv_heads, rows, loaded.kv.width(layer))
            # Also layers that borrow these keys: kernels of quantized caches demand outputs of each layer.
            users = [n for n in range(config.n_layers) if config.layer(n).kv_layer == number]
            for name in (io.KEYS, io.VALUES):
                outputs = [f"{io.NEW}{name}{user}" for user in users]
                tokens = [io.updated_by(one, n) for one in outputs for n in range(MOST - 1)]
                names = [f"{name}{number}", *outputs, *tokens]
                self._add(shape, loaded.kv.dtype, names)
        for number in config.conv_layers:
            names = [f"{io.CONV}{number}", f"{io.NEW}{io.CONV}{number}"]
            self._add((size, 1, length, config.dim), loaded.kv.of_conv, names)

    def _add(self, shape: tuple[int, ...], dtype: npt.DTypeLike, names: list[str]) -> None:
        self.arrays.append(empty(shape, dtype, f"the KV cache of {self.length:,} tokens"))
        self._names.append(names)

    def part(self, first: int, count: int) -> dict[str, ort.OrtValue]:
        """Return the graphs' KV cache inputs and outputs for the `count` sequences from index `first` on."""
        found = dict[str, ort.OrtValue]()
        for names, array in zip(self._names, self.arrays, strict=True):
            found |= dict.fromkeys(names, from_numpy(array[first : first + count]))
        return found

    def window(self, place: int = 0) -> KvWindow | None:
        """Return the sliding window of a new sequence at `place`; None in models without sliding windows."""
        short = [array for array in self.arrays if self._is_short(array)]
        if not short:
            return None
        # Imported only for such models.
        from stem_edge.runtime.backends.onnxruntime.kv_window import KvWindow

        return KvWindow([array[place : place + 1] for array in short], self._window)

    def nbytes_of(self, tokens: int) -> int:
        shapes = ((array[0], array.shape[2]) for array in self.arrays)
        return sum(one.nbytes // rows * min(rows, tokens) for one, rows in shapes)

    def move(self, place: int, to: Place, tokens: int, dropped: int) -> None:
        """Move a sequence's first `tokens` tokens from `place` to `to`, and free all memory of `place`.

        dropped: how many of these tokens have left the sliding window.
        """
        for array, other in zip(self.arrays, to.kv.arrays, strict=True):
            rows = max(0, tokens - dropped) if self._is_short(array) else tokens
            other[to.number, :, :rows] = array[place, :, :rows]
            free_pages(array[place])  # before the next copy, to have little in memory twice

    def _is_short(self, array: npt.NDArray[Any]) -> bool:
        rows: int = array.shape[2]
        return rows < self.length


class Place(NamedTuple):
    """Where the keys and values of a sequence are: arrays, and the sequence's index in these arrays."""

    kv: KvArrays
    number: int = 0


class OrtContext:
    """The KV cache of one sequence, in its own arrays or in arrays that several sequences share."""

    def __init__(self, loaded: Loaded, length: int) -> None:
        self.length = length
        self._rounds_by_step = loaded.config.n_experts > 0
        self.own = KvArrays(loaded, 1, length, pads=loaded.rows == "even")
        self.own.taken = 1
        self.place, self._window = Place(self.own), self.own.window()
        self.filled = 0  # tokens computed so far
        # Logits of the latest step, for an assistant also hidden states, and the position of the first token
        # with logits. The first context of a step has the results of all the step's contexts.
        self.results, self.first_result = dict[str, F32](), 0

    def nbytes_of(self, tokens: int) -> int:
        return self.own.nbytes_of(tokens)

    @property
    def earliest(self) -> int:
        return self._window.earliest if self._window else 0

    @property
    def dropped(self) -> int:
        return self._window.dropped if self._window else 0

    def resumes(self, tokens: int) -> Resumes:
        capacity = self._window.capacity if self._window else tokens
        steps = self.settled or tokens > capacity or self._rounds_by_step
        return "steps" if steps else "pairs"

    @property
    def settled(self) -> int:
        return self._window.settled if self._window else 0

    def rest(self) -> None:
        self.results = {}

    def kept(self, tokens: int) -> list[npt.NDArray[Any]]:
        kv, place = self.place
        if self.earliest or any(array.shape[2] < tokens for array in kv.arrays):
            return []
        return [array[place, :, :tokens] for array in kv.arrays]

    def restore(self, arrays: Iterable[npt.NDArray[Any]], tokens: int) -> None:
        for view, array in zip(self.kept(tokens), arrays, strict=True):
            view[...] = array
        self.filled = max(self.filled, tokens)

    def move(self, to: Place, tokens: int) -> None:
        """Move keys and values of the first `tokens` tokens to index `to.number` of `to.kv`."""
        if window := to.kv.window(to.number):
            window.dropped, window.settled = self.dropped, self.settled
        self.place.kv.move(self.place.number, to, tokens, self.dropped)
        self.place, self._window, self.filled = to, window, tokens

    def together(self, position: int) -> int:
        return self._window.together(position) if self._window else sys.maxsize

    def make_room(self, position: int, count: int) -> int:
        """Make room for `count` tokens from a position on; return how many tokens have left the sliding window."""
        dropped = self._window.make_room(position, count) if self._window else 0
        self.filled = max(self.filled, position + count)
        return dropped
