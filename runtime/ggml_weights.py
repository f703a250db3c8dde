"""The tensors of backbone.gguf for ggml's operators: in place in the mapped file, or rearranged."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError
from stem_edge.ggml import Ggml
from stem_edge.gguf_file import GgufFile, GgufTensor
from stem_edge.gguf_schema import gguf_name, repacks
from stem_edge.quantize import U8
from stem_edge.runtime.ggml_graph import Arena, Memory, Tensor

REPACK = "CPU_REPACK"  # ggml's name of the memory in which it rearranges weights


class Weights:
    """Backbone tensor (ModelConfig.backbone_shapes) -> tensor of ggml.

    `products` are for mul_mat alone: those that could be rearranged are, if asked for. Everything
    else is in `tensors`. Raises BackendError.
    """

    def __init__(self, ggml: Ggml, config: ModelConfig, file: GgufFile, *, repack: bool) -> None:
        names = {name: file.tensors[gguf_name(name)] for name in config.backbone_shapes()}
        mapping = _mapped(file.path, names["embedding"])
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
        self.products: Mapping[str, Tensor] = dict(self.tensors)
        if repack:
            self._repacked = _Repacked(ggml, self._arena, self._data, names)
            self.products = self.tensors | self._repacked.tensors
            if hasattr(mmap, "MADV_DONTNEED"):
                mapping.madvise(mmap.MADV_DONTNEED)  # pages that were read for the copies


class _Repacked:
    """Copies of matrices in memory where ggml rearranges them for its faster kernels."""

    def __init__(self, ggml: Ggml, arena: Arena, data: U8, names: Mapping[str, GgufTensor]) -> None:
        kind = ggml.extra_buffer_type(REPACK) if ggml.repack else None
        if kind is None:
            raise BackendError(
                f"{ggml.path}: this build of ggml does not rearrange weights; load without repack"
            )
        self.tensors: dict[str, Tensor] = {}
        stored = {
            name: tensor
            for name, tensor in names.items()
            if len(tensor.shape) == 2
            and name != "embedding"
            and repacks(tensor.type, tensor.shape[0])
        }
        for name, tensor in stored.items():
            self.tensors[name] = arena.tensor(tensor.type, *reversed(tensor.shape))
        alignment = ggml.backend_buft_get_alignment(kind)
        sizes = {
            name: _up(ggml.backend_buft_get_alloc_size(kind, tensor), alignment)
            for name, tensor in self.tensors.items()
        }
        total = sum(sizes.values())
        buffer = ggml.backend_buft_alloc_buffer(kind, total + alignment)
        if not buffer:
            raise BackendError(f"ggml cannot take {total:,} bytes for rearranged weights")
        weakref.finalize(self, ggml.backend_buffer_free, buffer)
        address = _up(ggml.backend_buffer_get_base(buffer), alignment)
        for name, made in self.tensors.items():
            ggml.backend_tensor_alloc(buffer, made, address)
            at, nbytes = data.ctypes.data + stored[name].offset, stored[name].nbytes
            ggml.backend_tensor_set(made, at, 0, nbytes)
            address += sizes[name]


def _up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def _mapped(path: Path, embedding: GgufTensor) -> mmap.mmap:
    """The bytes of a file, which stays open as long as they are used."""
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise BackendError(f"{path}: cannot be mapped ({error}); copy the bundle again") from error
    if hasattr(mmap, "MADV_WILLNEED"):
        # A step reads all of it, but for the embedding, of which it reads a row.
        before = embedding.offset // mmap.PAGESIZE * mmap.PAGESIZE
        after = _up(embedding.offset + embedding.nbytes, mmap.PAGESIZE)
        for start, stop in ((0, before), (min(after, len(mapping)), len(mapping))):
            if stop > start:
                mapping.madvise(mmap.MADV_WILLNEED, start, stop - start)
    return mapping
