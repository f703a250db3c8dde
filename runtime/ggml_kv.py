"""Memory of one context on ggml: keys and values, and what goes into and out of graphs."""

from __future__ import annotations

import numpy as np

from stem_edge import ggml_types
from stem_edge.ggml import Ggml
from stem_edge.quantize import F32
from stem_edge.runtime.ggml_graph import Arena, Graph, Memory, Tensor
from stem_edge.runtime.ggml_layers import KvTensors
from stem_edge.runtime.ggml_model import GgmlModel
from stem_edge.runtime.machine import page_aligned

# A graph attends to a number of cells that is a multiple of this, those beyond its tokens masked: a
# decoding graph serves so many steps.
CELLS = 64


class KvCache:
    """Keys and values of all layers; pages of memory come as cells are written."""

    def __init__(self, model: GgmlModel, length: int) -> None:
        config, kind = model.config, model.kv_type
        self.cells, width = rounded(length), config.n_kv_heads * config.head_dim
        self._token_nbytes = 2 * config.n_layers * kind.row_nbytes(width)
        size = self.cells * kind.row_nbytes(width)
        self._memory = Memory(model.ggml, page_aligned((2 * config.n_layers * size,)))
        self._arena, self._filled = Arena(model.ggml, 2 * config.n_layers), 0
        made = []
        for number in range(2 * config.n_layers):
            made.append(self._arena.tensor(kind, width, self.cells))
            self._memory.place(made[-1], number * size)
        self.tensors = KvTensors(kind, made[0::2], made[1::2])

    @property
    def nbytes(self) -> int:
        """Bytes of the cells that were written."""
        return self._filled * self._token_nbytes

    def fill(self, tokens: int) -> None:
        """Take note of how many there are."""
        self._filled = max(self._filled, tokens)


class Columns:
    """Vectors float32 [count, width] that outlive a run: hidden states between graphs, logits."""

    def __init__(self, ggml: Ggml, width: int, count: int) -> None:
        self.count, self._width = count, width
        data = page_aligned((max(1, count) * width * ggml_types.F32.nbytes,))
        self._memory = Memory(ggml, data)
        self.values: F32 = data.view(np.float32).reshape(-1, width)[:count]

    def tensor(self, graph: Graph, count: int) -> Tensor:
        """The first `count` as a tensor of a graph, [width, count]."""
        made = graph.arena.tensor(ggml_types.F32, self._width, count)
        self._memory.place(made)
        return made

    def take(self, result: Tensor) -> None:
        """Let the result of an operator be written here."""
        self._memory.place(result)


def rounded(tokens: int) -> int:
    """Cells that a graph for so many tokens attends to."""
    return -(-tokens // CELLS) * CELLS
