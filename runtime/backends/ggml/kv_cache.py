"""KV cache of a context: each layer that computes keys and values has cells, one for each token.

In layers with a sliding window the cells are a ring: a token overwrites the cell of a token that is in no
window any more. Keys are rotated (RoPE) before they are stored, so the order of cells does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from stem_edge.config import ModelConfig
from stem_edge.ggml.library import Ggml
from stem_edge.ggml.types import TensorType
from stem_edge.graph import names as io
from stem_edge.numerics.quantize import U8
from stem_edge.runtime.backends.ggml.graph import Arena, MappedBuffer
from stem_edge.runtime.backends.interface import BackendContext, Resumes
from stem_edge.system.memory import own_pages

# Cells that a graph attends to are rounded up to a multiple of this, so that a graph for decoding
# serves so many steps; cells beyond the tokens are masked.
CELLS = 64


class KvCache(BackendContext):
    """Keys and values of up to `length` tokens; the system commits memory as cells are written."""

    def __init__(self, ggml: Ggml, config: ModelConfig, kind: TensorType, length: int) -> None:
        self.length = length
        self.rings = {
            layer.window: Ring(layer.window, io.kv_capacity(layer.window, length))
            for layer in config.layers
        }
        own = config.layers[: config.own_kv_layers]
        lines = [(one.n_kv_heads * one.head_dim, self.rings[one.window].capacity) for one in own]
        shapes = [(rounded(n), kind.row_nbytes(width)) for width, n in lines for _ in "kv"]
        data = own_pages((sum(map(prod, shapes)),), np.uint8)
        self._memory = MappedBuffer(ggml, data)
        self._arena = Arena(ggml, len(shapes))
        made = [self._arena.tensor(kind, width, rounded(n)) for width, n in lines for _ in "kv"]
        self._arrays, at = list[U8](), 0  # keys and values of each layer [cells, bytes of a cell]
        for tensor, shape in zip(made, shapes, strict=True):
            self._memory.place(tensor, at)
            self._arrays.append(data[at : at + prod(shape)].reshape(shape))
            at += prod(shape)
        # [layer], each a tensor [n_kv_heads * head_dim, cells]
        self.type, self.keys, self.values = kind, made[0::2], made[1::2]
        self._cells = [(2 * kind.row_nbytes(width), cells) for width, cells in lines]
        self.filled = 0

    def nbytes_of(self, tokens: int) -> int:
        return sum(nbytes * min(tokens, cells) for nbytes, cells in self._cells)

    def resumes(self, tokens: int) -> Resumes:
        # ggml chooses kernels by the number of tokens in a step, and they round differently.
        return "steps"

    def rest(self) -> None:
        """Do nothing. Other engines free the last step's logits here; on ggml, logits belong to a graph."""

    def together(self, position: int) -> int:
        return self.length - position

    def kept(self, tokens: int) -> list[U8]:
        """Return views of the first `tokens` tokens' keys and values: for each layer, two [tokens, bytes per token]."""
        if self.earliest or any(ring.capacity < tokens for ring in self.rings.values()):
            return []
        return [array[:tokens] for array in self._arrays]

    def restore(self, arrays: Iterable[npt.NDArray[Any]], tokens: int) -> None:
        for view, array in zip(self.kept(tokens), arrays, strict=True):
            view[...] = array
        self.make_room(0, tokens)
        self.fill(tokens)

    @property
    def earliest(self) -> int:
        """Earliest position, except 0, where a step finds all tokens of its windows in cells."""
        return max(ring.earliest for ring in self.rings.values())

    @property
    def settled(self) -> int:
        return self.earliest  # because a token's position determines its cell

    def make_room(self, position: int, count: int) -> None:
        """Prepare cells for `count` tokens from a position on. Tokens that are there already are replaced."""
        for ring in self.rings.values():
            ring.advance(position, count)

    def fill(self, tokens: int) -> None:
        """Record that the cells of the first `tokens` tokens are written."""
        self.filled = max(self.filled, tokens)


class Ring:
    """Tracks which token is in which cell, for all layers with a window of `window` tokens (0: no window)."""

    def __init__(self, window: int, capacity: int) -> None:
        self.window, self.capacity, self._end = window, capacity, 0

    @property
    def earliest(self) -> int:
        """Earliest position, except 0, where a step finds all tokens of its window in cells."""
        # The last tokens have overwritten the first cells.
        return self._end - self.capacity + self.window - 1 if self._end > self.capacity else 0

    def advance(self, position: int, count: int) -> None:
        """Record that a step writes `count` tokens from a position on. At position 0, the ring begins empty."""
        self._end = max(self._end if position else 0, position + count)

    def attended(self, tokens: int) -> int:
        """Return how many cells a graph attends to with `tokens` tokens in the context: a multiple of CELLS."""
        return rounded(min(self.capacity, tokens))

    def mask(self, positions: npt.NDArray[np.int64], cells: int) -> npt.NDArray[np.float16]:
        """Return a mask [T, cells]: 0 where a token attends to a cell, else -inf."""
        mask = np.full((len(positions), cells), -np.inf, np.float16)
        for row, position in zip(mask, positions.tolist(), strict=True):
            first = max(0, position + 1 - self.window) if self.window else 0
            start, stop = first % self.capacity, position % self.capacity + 1
            if start < stop:
                row[start:stop] = 0
            else:  # the window goes on in the first cells
                row[start : self.capacity] = 0
                row[:stop] = 0
        return mask


def rounded(cells: int) -> int:
    """Round a number of KV cache cells up to a multiple of CELLS."""
    return -(-cells // CELLS) * CELLS
