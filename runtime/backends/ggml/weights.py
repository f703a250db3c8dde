"""A loaded backbone.gguf: its tensors, in the mapped file or as repacked copies, and the slots of its rows."""

from __future__ import annotations

import mmap
import platform
from collections.abc import Mapping, Sequence

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError, OutOfMemoryError
from stem_edge.files import disk
from stem_edge.ggml import types as ggml_types
from stem_edge.ggml.gguf_schema import repacks
from stem_edge.ggml.gguf_tensors import GgufTensor, GgufWeights
from stem_edge.ggml.library import Ggml
from stem_edge.ggml.types import TensorType
from stem_edge.numerics.quantize import U8
from stem_edge.runtime.backends.ggml.graph import (
    Arena,
    GgmlGraph,
    MappedBuffer,
    Processor,
    Tensor,
    freed_with,
)
from stem_edge.runtime.backends.ggml.slots import BlockSlots
from stem_edge.system.memory import advise_huge_pages

MANY_TOKENS = 32
X86 = ("x86_64", "amd64")
# ggml's products with 2 or 3 tokens take 1.2 to 1.4 times as long as with each by itself. By K-quants
# it multiplies in tiles of 16 tokens from 8 on: half empty, they take as long, 1.5 times as long.
TOKEN_BY_TOKEN = {
    ggml_types.Q8_0: range(2, 4),
    ggml_types.Q4_0: range(2, 4),
    ggml_types.Q4_K: range(8, 12),
    ggml_types.Q6_K: range(8, 12),
}
REPACK = "CPU_REPACK"  # ggml's buffer type for repacked weights


class Weights:
    """Tensors of ggml by the names in ModelConfig.backbone_shapes.

    repack: copy matrices into the layout that ggml has faster kernels for. Raises BackendError.
    """

    def __init__(self, ggml: Ggml, config: ModelConfig, file: GgufWeights, *, repack: bool) -> None:
        self._file, names = file, dict(file.tensors)
        mapping = _mapped(file, names["embedding"])
        self._data: U8 = np.frombuffer(mapping, np.uint8)
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
        self._few = self._many = self.tensors
        if repack:
            copies = self._repack(ggml, names)
            self._few = self.tensors | copies
            many = {n: c for n, c in copies.items() if repacked_for_prompts(names[n].type)}
            self._many = self.tensors | many
            if hasattr(mmap, "MADV_DONTNEED"):
                mapping.madvise(mmap.MADV_DONTNEED)  # steps read the copies instead

    def _repack(self, ggml: Ggml, names: Mapping[str, GgufTensor]) -> dict[str, Tensor]:
        """Return repacked copies of the matrices that ggml has faster kernels for."""
        stored = {
            name: tensor
            for name, tensor in names.items()
            if len(tensor.shape) == 2
            and name != "embedding"
            and repacks(tensor.type, tensor.shape[0])
        }
        copies = {
            name: self._arena.tensor(tensor.type, *reversed(tensor.shape))
            for name, tensor in stored.items()
        }
        self._copies = RepackedMemory(ggml, list(copies.values()))
        for name, copy in copies.items():
            self._copies.fill(copy, self._data.ctypes.data + stored[name].offset)
        return copies

    def number(self, name: str) -> float:
        """Return the value of a tensor [1] of type float32."""
        start = self._file.tensors[name].offset
        return float(self._data[start : start + ggml_types.F32.nbytes].view(np.float32)[0])

    def product(self, graph: GgmlGraph, name: str, x: Tensor, tokens: int) -> Tensor:
        """Return a matrix [M, K] times hidden states x [K, T], as [M, T] or [M, 1, T]."""
        matrix = (self._few if tokens < MANY_TOKENS else self._many)[name]
        stored = self._stored[name]
        if matrix == self.tensors[name] and token_by_token(stored.type, tokens):
            x = graph.op("reshape_3d", x, stored.shape[1], 1, tokens)
        return graph.op("mul_mat", matrix, x)


def token_by_token(stored: TensorType, tokens: int) -> bool:
    """Return whether a product with each token by itself is faster than one with `tokens` tokens.

    Measured with AVX-512 and weights that no cache holds; see TOKEN_BY_TOKEN.
    """
    few = TOKEN_BY_TOKEN.get(stored, range(0))
    return tokens in few and platform.machine().lower() in X86


def repacked_for_prompts(stored: TensorType) -> bool:
    """Return whether the repacked copy is faster for many tokens, too.

    Fixed rather than timed at each load, so that a prompt always gives the same text. At the 1B
    shape with AVX-512, Q4_K prompts ran at 150 tokens a second with copies and at 208 without; up to
    MANY_TOKENS the copies are faster, by 1.9 times at 8 tokens.
    """
    return stored is not ggml_types.Q4_K or platform.machine().lower() not in X86


def _mapped(file: GgufWeights, embedding: GgufTensor) -> mmap.mmap:
    """Map the file, after comparing its size.

    The comparison is needed because reading a mapping beyond the end of its file kills the process.
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


def can_repack(ggml: Ggml) -> bool:
    """Return whether this build has kernels for repacked weights, which passed their trial."""
    return ggml.repack and ggml.extra_buffer_type(REPACK) is not None


class RepackedMemory:
    """Memory for repacked copies of matrices. Raises BackendError, OutOfMemoryError."""

    def __init__(self, ggml: Ggml, tensors: Sequence[Tensor]) -> None:
        refusal = f"{ggml.path}: this build of ggml cannot repack weights; leave repack out"
        kind = ggml.extra_buffer_type(REPACK) if can_repack(ggml) else None
        if kind is None:
            raise BackendError(refusal)
        self._ggml, step = ggml, int(ggml.backend_buft_get_alignment(kind))
        sizes = [_up(ggml.backend_buft_get_alloc_size(kind, tensor), step) for tensor in tensors]
        total = sum(sizes) + step
        buffer = ggml.backend_buft_alloc_buffer(kind, total)
        if not buffer:
            raise OutOfMemoryError(
                f"ggml cannot allocate {total:,} bytes for repacked weights; leave repack out"
            )
        freed_with(self, ggml.backend_buffer_free, buffer)
        base = ggml.backend_buffer_get_base(buffer)
        # Saves 7 % of a decode step at the 1B shape, because prefetching stops at page boundaries.
        advise_huge_pages(base, total)
        address = _up(base, step)
        for tensor, size in zip(tensors, sizes, strict=True):
            ggml.backend_tensor_alloc(buffer, tensor, address)
            address += size
            if not _multiplies(ggml, tensor):  # otherwise `fill` would abort the process
                raise BackendError(refusal)

    def fill(self, tensor: Tensor, address: int) -> None:
        """Repack a matrix that lies at this address as in the file."""
        self._ggml.backend_tensor_set(tensor, address, 0, self._ggml.nbytes(tensor))


def _multiplies(ggml: Ggml, matrix: Tensor) -> bool:
    """Return whether ggml can multiply by a matrix in the buffer where it lies."""
    arena = Arena(ggml, 2)
    column = arena.tensor(ggml_types.F32, ggml.nelements(matrix) // ggml.nrows(matrix), 1)
    product = ggml.mul_mat(arena.context, matrix, column)
    device = ggml.backend_reg_dev_get(ggml.backend_cpu_reg(), 0)
    return bool(ggml.backend_dev_supports_op(device, product))


def _up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


class GgmlModel:
    """A loaded backbone.gguf and the slots that its rows are read from.

    kv_type: of keys and values, one of gguf_schema.KV_TENSORS. Raises BackendError.
    """

    def __init__(
        self,
        ggml: Ggml,
        config: ModelConfig,
        file: GgufWeights,
        slots: BlockSlots | None,
        threads: int,
        kv_type: TensorType,
        *,
        repack: bool = False,
    ) -> None:
        self.ggml, self.config, self.kv_type = ggml, config, kv_type
        self.processor = Processor(ggml, threads)
        self.weights = Weights(ggml, config, file, repack=repack)
        self.slots: dict[int, list[Tensor]] = {}  # STEM layer -> slots of each part of its rows
        if slots is not None:
            count = len(slots.layout.layers) * len(slots.layout.parts)
            self._arena, self._memory = Arena(ggml, count), list[MappedBuffer]()
            for layer, parts in zip(slots.layout.layers, slots.rows, strict=True):
                shapes = zip(slots.layout.parts, parts, strict=True)
                self.slots[layer] = [self._placed(slots, *part) for part in shapes]

    def _placed(self, slots: BlockSlots, shape: tuple[int, ...], rows: U8) -> Tensor:
        """Return a tensor [..., count] over the slots of a part of a layer's rows."""
        memory = MappedBuffer(self.ggml, rows.reshape(-1))
        tensor = self._arena.tensor(slots.type, *reversed(shape), slots.count)
        memory.place(tensor)
        self._memory.append(memory)
        return tensor
