"""Layout of the tensors in backbone.gguf, computed from the model and its tensor types.

The runtime computes the offset of each tensor and does not parse the header, which is there for
other tools. It only compares the header's list of tensors, byte for byte, with the expected list.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import NamedTuple

from stem_edge.config import ModelConfig
from stem_edge.errors import BundleError
from stem_edge.files import disk
from stem_edge.files.plain_files import read_at
from stem_edge.ggml.gguf_schema import ALIGNMENT, gguf_name, tensor_types
from stem_edge.ggml.types import TensorType
from stem_edge.graph.formats import GgufType, OwnTypes

EXPORT_AGAIN = "copy the bundle again or export the backbone with: stem-edge export CHECKPOINT OUT --engine ggml"


class GgufTensor(NamedTuple):
    """Tensor in a GGUF file. Its shape is [outputs, inputs] or [n]: GGUF's `ne` reversed."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int  # bytes from the beginning of the data

    @property
    def nbytes(self) -> int:
        *rows, width = self.shape
        return prod(rows) * self.type.row_nbytes(width)

    @property
    def end(self) -> int:
        """Offset at which the next tensor begins, in bytes."""
        return -(-(self.offset + self.nbytes) // ALIGNMENT) * ALIGNMENT


class GgufWeights(NamedTuple):
    """Tensors of a backbone's GGUF file, by name. Offsets count from the start of the file."""

    path: Path
    nbytes: int
    tensors: dict[str, GgufTensor]


def lay_out(tensors: Iterable[tuple[str, TensorType, tuple[int, ...]]]) -> list[GgufTensor]:
    """Place tensors (name, type, shape) one after another, and return them with their offsets."""
    placed, at = list[GgufTensor](), 0
    for tensor in tensors:
        placed.append(GgufTensor(*tensor, at))
        at = placed[-1].end
    return placed


def planned_tensors(config: ModelConfig, weights: GgufType | OwnTypes) -> list[GgufTensor]:
    """Return a backbone's tensors with offsets, in the order of ModelConfig.backbone_shapes."""
    types = tensor_types(config, weights)
    return lay_out(
        (gguf_name(name), types[name], shape) for name, shape in config.backbone_shapes().items()
    )


def encode_tensors(tensors: Iterable[GgufTensor]) -> bytes:
    """Encode the list of tensors, the last part of a GGUF header."""
    parts = []
    for tensor in tensors:
        name = tensor.name.encode()
        sizes = tensor.shape[::-1]  # reversed, because GGUF lists the contiguous axis first
        parts.append(struct.pack("<Q", len(name)) + name)
        parts.append(struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
        parts.append(struct.pack("<IQ", tensor.type.number, tensor.offset))
    return b"".join(parts)


def locate(
    path: Path, nbytes: int, config: ModelConfig, weights: GgufType | OwnTypes
) -> GgufWeights:
    """Locate a backbone's tensors in the file `path` of `nbytes` bytes. Raises BundleError."""
    planned = planned_tensors(config, weights)
    start, expected = nbytes - planned[-1].end, encode_tensors(planned)
    before = len(expected) + ALIGNMENT - 1  # room for the padding that aligns the data
    if start < before or start % ALIGNMENT:
        raise BundleError(
            f"{path}: {nbytes} bytes found; expected a header and {planned[-1].end} bytes of this "
            f"model's tensors; {EXPORT_AGAIN}"
        )
    found = _read(path, start - before, before)
    if not any(found.endswith(expected + bytes(padding)) for padding in range(ALIGNMENT)):
        raise BundleError(
            f"{path}: its header lists other tensors than this model's; {EXPORT_AGAIN}"
        )
    names = config.backbone_shapes()
    moved = (tensor._replace(offset=start + tensor.offset) for tensor in planned)
    return GgufWeights(path, nbytes, dict(zip(names, moved, strict=True)))


def _read(path: Path, start: int, nbytes: int) -> bytes:
    try:
        with disk.opened(path) as descriptor:
            return bytes(read_at(descriptor, nbytes, start))
    except OSError as error:
        raise BundleError(
            f"{path}: cannot read ({error.strerror}); restore the file or {EXPORT_AGAIN}"
        ) from error
