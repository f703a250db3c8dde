"""Cosines and sines of RoPE in the memory of a provider, shared by the contexts of a backend.

In this process's memory they are computed as far as a context has come, and the system provides
their pages then; a device gets all of them at once.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from stem_edge.config import ModelConfig
from stem_edge.graph import names as io
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.rope import rope_tables
from stem_edge.runtime.backends.onnxruntime.memory import DeviceMemory

BLOCK = 1024  # positions that are computed at once


class RopeArrays:
    """Graph inputs with the rotations of positions up to `length`. Raises OutOfMemoryError."""

    def __init__(
        self, config: ModelConfig, memory: DeviceMemory, dtype: npt.DTypeLike, length: int
    ) -> None:
        self._config, self.length, self._filled = config, length, 0
        on_device = memory.kind == "device"
        shapes = padded_ropes(config, length if on_device else 0)
        self._arrays = {
            name: memory.empty((length, table.shape[1]), dtype, "the RoPE tables")
            for name, table in shapes.items()
        }
        if on_device:
            self._filled = length
            for name, table in shapes.items():
                self._arrays[name].write(table.astype(dtype))

    def values(self) -> Mapping[str, ort.OrtValue]:
        """Return the inputs, [length, head_width / 2] each."""
        return {name: array.value() for name, array in self._arrays.items()}

    def fill(self, positions: int) -> None:
        """Compute the rotations of so many positions, as far as that has not been done."""
        while self._filled < min(positions, self.length):
            start, stop = self._filled, min(self._filled + BLOCK, self.length)
            for name, table in padded_ropes(self._config, stop, start).items():
                self._arrays[name].host[start:stop] = table
            self._filled = stop


class Ropes:
    """Rotations that all contexts of a backbone share."""

    def __init__(self, config: ModelConfig, memory: DeviceMemory, dtype: npt.DTypeLike) -> None:
        self._described, self._longest = (config, memory, dtype), list[RopeArrays]()

    def upto(self, length: int) -> RopeArrays:
        """Return the rotations for a context; another one's if they suffice, else longer ones."""
        if not self._longest or self._longest[0].length < length:
            self._longest[:] = [RopeArrays(*self._described, length)]
        return self._longest[0]

    def clear(self) -> None:
        """Release them; contexts keep theirs."""
        self._longest.clear()


def padded_ropes(config: ModelConfig, positions: int, start: int = 0) -> dict[str, F32]:
    """Return graph input -> RoPE table, [positions - start, head_width / 2], padded with zeros."""
    tables: dict[str, F32] = {}
    for layer in map(config.layer, range(config.n_layers)):
        names = io.rope_names(config, layer)
        if names[0] not in tables:
            padding = ((0, 0), (0, (io.head_width(layer) - layer.head_dim) // 2))
            found = rope_tables(layer.rope, positions, start)
            tables |= dict(zip(names, (np.pad(one, padding) for one in found), strict=True))
    return tables
