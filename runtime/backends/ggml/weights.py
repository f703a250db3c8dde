"""A loaded backbone.gguf: its tensors in the mapped file, and tensors over the row cache's slots."""

from __future__ import annotations

import mmap
import platform

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError
from stem_edge.files import disk
from stem_edge.ggml import types as ggml_types
from stem_edge.ggml.gguf_tensors import GgufTensor, GgufWeights
from stem_edge.ggml.library import Ggml
from stem_edge.ggml.types import TensorType
from stem_edge.numerics.quantize import U8
from stem_edge.runtime.backends.ggml.graph import Arena, GgmlGraph, MappedBuffer, Processor, Tensor
from stem_edge.runtime.backends.ggml.slots import BlockSlots

X86 = ("x86_64", "amd64")
# Numbers of tokens for which a product of each token is faster than one of all (measured with AVX-512 and weights
# larger than the caches): for 2 or 3 tokens, one product of all takes 1.2 to 1.4 times as long. From 8 tokens
# on, ggml multiplies K-quants in tiles of 16 tokens: with 8 to 11 tokens, that takes 1.5 times as long.
TOKEN_BY_TOKEN = {
    ggml_types.Q8_0: range(2, 4),
    ggml_types.Q4_0: range(2, 4),
    ggml_types.Q4_K: range(8, 12),
    ggml_types.Q6_K: range(8, 12),
}


class Weights:
    """The backbone's ggml tensors, by the names in ModelConfig.backbone_shapes. Raises BackendError."""

    def __init__(self, ggml: Ggml, config: ModelConfig, file: GgufWeights) -> None:
        self._file, names = file, dict(file.tensors)
        self._data: U8 = np.frombuffer(_mapped(file, names["embedding"]), np.uint8)
        self._memory = MappedBuffer(ggml, self._data)
        self._arena = Arena(ggml, 2 * len(names))
        self.tensors: dict[str, Tensor] = {}
        for name, stored in names.items():
            self.tensors[name] = self._arena.tensor(stored.type, *reversed(stored.shape))
            self._memory.place(self.tensors[name], stored.offset)
        if config.tied_head:
            self.tensors["head"] = self.tensors["embedding"]
            names["head"] = names["embedding"]
        self._stored = names

    def number(self, name: str) -> float:
        """Return the value of a float32 tensor that has one element."""
        start = self._file.tensors[name].offset
        return float(self._data[start : start + ggml_types.F32.nbytes].view(np.float32)[0])

    def product(self, graph: GgmlGraph, name: str, x: Tensor, tokens: int) -> Tensor:
        """Return `name` [M, K] times x [K, tokens]: [M, tokens], or [M, 1, tokens] if faster."""
        stored = self._stored[name]
        few = TOKEN_BY_TOKEN.get(stored.type, range(0))
        if tokens in few and platform.machine().lower() in X86:
            x = graph.op("reshape_3d", x, stored.shape[1], 1, tokens)
        return graph.op("mul_mat", self.tensors[name], x)


def _mapped(file: GgufWeights, embedding: GgufTensor) -> mmap.mmap:
    """Map the file into memory, and read it ahead except for `embedding`. Raises BackendError.

    The size is checked first, because reading a mapping beyond the end of its file would kill the process.
    """
    path = file.path
    try:
        descriptor = disk.open_file(path)
        try:
            if (found := disk.size(descriptor)) != file.nbytes:
                raise BackendError(
                    f"{path}: {found} bytes found, expected {file.nbytes}; copy the bundle again"
                )
            mapping = mmap.mmap(descriptor, file.nbytes, access=mmap.ACCESS_READ)
        finally:
            disk.close(descriptor)
    except (OSError, ValueError) as error:
        raise BackendError(f"{path}: cannot be mapped ({error}); copy the bundle again") from error
    if hasattr(mmap, "MADV_WILLNEED"):
        # Not the embedding, because a step reads only single rows of it, but everything else.
        before = embedding.offset // mmap.PAGESIZE * mmap.PAGESIZE
        after = -(-(embedding.offset + embedding.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        for start, stop in ((0, before), (min(after, len(mapping)), len(mapping))):
            if stop > start:
                mapping.madvise(mmap.MADV_WILLNEED, start, stop - start)
    return mapping


class GgmlModel:
    """A loaded backbone.gguf, and the row cache slots that it reads rows from.

    kv_type: type of keys and values, one of gguf_schema.KV_TENSORS. Raises BackendError.
    """

    def __init__(
        self,
        ggml: Ggml,
        config: ModelConfig,
        file: GgufWeights,
        slots: BlockSlots | None,
        threads: int,
        kv_type: TensorType,
    ) -> None:
        self.ggml, self.config, self.kv_type = ggml, config, kv_type
        self.processor = Processor(ggml, threads)
        self.weights = Weights(ggml, config, file)
        self.slots: dict[int, list[Tensor]] = {}  # STEM layer -> slots of each part of its rows
        if slots is not None:
            count = len(slots.layout.layers) * len(slots.layout.parts)
            self._arena, self._memory = Arena(ggml, count), list[MappedBuffer]()
            for layer, parts in zip(slots.layout.layers, slots.rows, strict=True):
                shapes = zip(slots.layout.parts, parts, strict=True)
                self.slots[layer] = [self._placed(slots, *part) for part in shapes]

    def _placed(self, slots: BlockSlots, shape: tuple[int, ...], rows: U8) -> Tensor:
        """Return a ggml tensor over `rows`: one part of a layer's rows, in all cache slots."""
        memory = MappedBuffer(self.ggml, rows.reshape(-1))
        tensor = self._arena.tensor(slots.type, *reversed(shape), slots.count)
        memory.place(tensor)
        self._memory.append(memory)
        return tensor
