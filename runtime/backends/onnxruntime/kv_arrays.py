"""Keys and values of sequences in the memory of a provider, as graphs take them.

Pages of this process's memory are provided as they are written, so that an array may be as long as
the longest text. On the CPU, layers with a window keep no more than that needs (kv_window.py).
"""

from __future__ import annotations

import numpy as np
import onnxruntime as ort

from stem_edge.graph import names as io
from stem_edge.runtime.backends.onnxruntime.kv_window import KvWindow
from stem_edge.runtime.backends.onnxruntime.loaded import Loaded
from stem_edge.runtime.backends.onnxruntime.memory import DeviceArray
from stem_edge.system.memory import free_pages


class KvArrays:
    """Arrays [size, heads, rows, width] for sequences of up to `length` tokens, two a layer.

    Raises OutOfMemoryError.
    """

    def __init__(self, loaded: Loaded, size: int, length: int) -> None:
        config, self.length = loaded.config, length
        self.arrays: list[DeviceArray] = []
        self._window, self._names = config.sliding_window, list[list[str]]()
        for number in range(config.own_kv_layers):
            layer = config.layer(number)
            rows = io.kv_capacity(layer.window, length) if loaded.windowed else length
            shape = (size, layer.n_kv_heads, rows, loaded.kv.width(layer))
            # Those that borrow it, too: kernels of quantized caches demand outputs of each.
            users = [n for n in range(config.n_layers) if config.layer(n).kv_layer == number]
            for name in (io.KEYS, io.VALUES):
                what, dtype = f"the KV cache of {length:,} tokens", np.dtype(loaded.kv.dtype)
                self.arrays.append(loaded.memory.empty(shape, dtype, what))
                outputs = [f"{io.NEW}{name}{user}" for user in users]
                self._names.append([f"{name}{number}", *outputs])

    def values(self) -> dict[str, ort.OrtValue]:
        """Return inputs and outputs of the graphs for all sequences."""
        pairs = zip(self._names, self.arrays, strict=True)
        return {name: array.value() for names, array in pairs for name in names}

    def part(self, first: int, count: int) -> dict[str, ort.OrtValue]:
        """Return `values` for some sequences, in this process's memory."""
        found = dict[str, ort.OrtValue]()
        for names, array in zip(self._names, self.arrays, strict=True):
            view = array.host[first : first + count]
            found |= dict.fromkeys(names, ort.OrtValue.ortvalue_from_numpy(view))
        return found

    def beginning(self, count: int) -> dict[str, ort.OrtValue]:
        """Return `values` for the first `count` sequences, in any memory."""
        pairs = zip(self._names, self.arrays, strict=True)
        return {name: array.beginning(count) for names, array in pairs for name in names}

    def window(self, place: int = 0) -> KvWindow:
        """Return the window of a sequence without tokens."""
        short = [array for array in self.arrays if self._is_short(array)]
        return KvWindow([array.host[place : place + 1] for array in short], self._window)

    def nbytes_of(self, tokens: int) -> int:
        """Return the bytes that so many tokens of each sequence fill."""
        shapes = ((array, array.shape[2]) for array in self.arrays)
        return sum(a.nbytes // rows * min(rows, tokens) for a, rows in shapes)

    def copy(self, place: int, source: KvArrays, other: int, tokens: int, dropped: int) -> None:
        """Copy what another place, of these arrays or of others, has of a sequence.

        dropped: of its first tokens, how many have left the window.
        """
        for array, found in zip(self.arrays, source.arrays, strict=True):
            rows = tokens - dropped if source._is_short(found) else tokens
            array.host[place, :, :rows] = found.host[other, :, :rows]

    def free(self, place: int, tokens: int = 0) -> None:
        """Give the memory of a sequence, from so many tokens on, back to the system."""
        for array in self.arrays:
            for head in array.host[place]:
                free_pages(head[tokens:])

    def _is_short(self, array: DeviceArray) -> bool:
        return array.shape[2] < self.length
