"""The tensors of backbone.gguf for ggml's operators: in place in the mapped file, or rearranged."""

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
from stem_edge.runtime.backends.ggml.graph import Arena, Memory, Tensor, freed_with
from stem_edge.system.memory import advise_huge_pages

MANY_TOKENS = 8
X86 = ("x86_64", "amd64")
REPACK = "CPU_REPACK"  # ggml's name of the memory in which it rearranges


class Weights:
    """Backbone tensor (ModelConfig.backbone_shapes) -> tensor of ggml.

    Matrices that can be rearranged have a copy that is, if asked for. Raises BackendError.
    """

    def __init__(self, ggml: Ggml, config: ModelConfig, file: GgufWeights, *, repack: bool) -> None:
        names = dict(file.tensors)
        mapping = _mapped(file, names["embedding"])
        self._data: U8 = np.frombuffer(mapping, np.uint8)
        self._memory = Memory(ggml, self._data)
        self._arena = Arena(ggml, 2 * len(names))
        self.tensors: dict[str, Tensor] = {}
        for name, stored in names.items():
            self.tensors[name] = self._arena.tensor(stored.type, *reversed(stored.shape))
            self._memory.place(self.tensors[name], stored.offset)
        if config.tied_head:
            self.tensors["head"] = self.tensors["embedding"]
            names["head"] = names["embedding"]
        self._few = self._many = self.tensors
        if repack:
            copies = self._repack(ggml, names)
            self._few = self.tensors | copies
            many = {n: c for n, c in copies.items() if repacked_for_prompts(names[n].type)}
            self._many = self.tensors | many
            if hasattr(mmap, "MADV_DONTNEED"):
                mapping.madvise(mmap.MADV_DONTNEED)  # pages that were read for the copies

    def _repack(self, ggml: Ggml, names: Mapping[str, GgufTensor]) -> dict[str, Tensor]:
        """Rearranged copies of the matrices that ggml has faster kernels for."""
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

    def product(self, name: str, tokens: int) -> Tensor:
        """A matrix for mul_mat with the hidden states of so many tokens, and for nothing else."""
        return (self._few if tokens < MANY_TOKENS else self._many)[name]


def repacked_for_prompts(stored: TensorType) -> bool:
    """Whether the copy is the faster one for many tokens, too.

    Not timed at each load, so that the same prompt always gives the same text. At the 1B shape on
    AVX512, prompts of Q4_K ran at 150 tokens a second through copies, and at 208 without.
    """
    return stored is not ggml_types.Q4_K or platform.machine().lower() not in X86


def _mapped(file: GgufWeights, embedding: GgufTensor) -> mmap.mmap:
    """The bytes of a file, which stays open as long as they are used.

    Reading a mapping beyond the end of its file ends the process, so that is compared first.
    """
    path = file.path
    try:
        descriptor = disk.open_file(path)
        try:
            if (found := disk.size(descriptor)) != file.nbytes:
                raise BackendError(
                    f"{path}: {found} bytes found, {file.nbytes} when the bundle was opened; "
                    "copy the bundle again"
                )
            mapping = mmap.mmap(descriptor, file.nbytes, access=mmap.ACCESS_READ)
        finally:
            disk.close(descriptor)
    except (OSError, ValueError) as error:
        raise BackendError(f"{path}: cannot be mapped ({error}); copy the bundle again") from error
    if hasattr(mmap, "MADV_WILLNEED"):
        # A step reads all of it, but for the embedding, of which it reads a row.
        before = embedding.offset // mmap.PAGESIZE * mmap.PAGESIZE
        after = -(-(embedding.offset + embedding.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        for start, stop in ((0, before), (min(after, len(mapping)), len(mapping))):
            if stop > start:
                mapping.madvise(mmap.MADV_WILLNEED, start, stop - start)
    return mapping


def can_repack(ggml: Ggml) -> bool:
    """Whether this build has such kernels, and they computed the right products when tried."""
    return ggml.repack and ggml.extra_buffer_type(REPACK) is not None


class RepackedMemory:
    """Places for some matrices. Raises BackendError."""

    def __init__(self, ggml: Ggml, tensors: Sequence[Tensor]) -> None:
        refusal = f"{ggml.path}: this build of ggml does not rearrange weights; leave repack out"
        kind = ggml.extra_buffer_type(REPACK) if can_repack(ggml) else None
        if kind is None:
            raise BackendError(refusal)
        self._ggml, step = ggml, int(ggml.backend_buft_get_alignment(kind))
        sizes = [_up(ggml.backend_buft_get_alloc_size(kind, tensor), step) for tensor in tensors]
        total = sum(sizes) + step
        buffer = ggml.backend_buft_alloc_buffer(kind, total)
        if not buffer:
            raise OutOfMemoryError(
                f"ggml cannot take {total:,} bytes for rearranged weights; leave repack out"
            )
        freed_with(self, ggml.backend_buffer_free, buffer)
        base = ggml.backend_buffer_get_base(buffer)
        # 7 % of a decode step at the 1B shape: pages of 4 KiB end what a processor reads ahead.
        advise_huge_pages(base, total)
        address = _up(base, step)
        for tensor, size in zip(tensors, sizes, strict=True):
            ggml.backend_tensor_alloc(buffer, tensor, address)
            address += size
            if not _multiplies(ggml, tensor):  # filling it would end the process
                raise BackendError(refusal)

    def fill(self, tensor: Tensor, address: int) -> None:
        """Rearrange a matrix that lies at this address as a file has it."""
        self._ggml.backend_tensor_set(tensor, address, 0, self._ggml.nbytes(tensor))


def _multiplies(ggml: Ggml, matrix: Tensor) -> bool:
    """Whether ggml has products for a matrix where it lies."""
    arena = Arena(ggml, 2)
    column = arena.tensor(ggml_types.F32, ggml.nelements(matrix) // ggml.nrows(matrix), 1)
    product = ggml.mul_mat(arena.context, matrix, column)
    device = ggml.backend_reg_dev_get(ggml.backend_cpu_reg(), 0)
    return bool(ggml.backend_dev_supports_op(device, product))


def _up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment
