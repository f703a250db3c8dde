"""Where the tensors of backbone.gguf lie: it follows from the model and the mixture of types.

The data of a GGUF file is its end, tensors one after the other. So the runtime knows the place of
each without parsing the header, which only other tools read; what the header says of the tensors is
compared with what we would write, byte for byte.
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
from stem_edge.graph.formats import GgufType

EXPORT_AGAIN = "copy the bundle again or export the backbone with: stem-edge export CHECKPOINT OUT --engine gguf"


class GgufTensor(NamedTuple):
    """A tensor in a file. Its shape is [outputs, inputs] or [n], the reverse of the file's."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int  # from the beginning of the data

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        *rows, width = self.shape
        return prod(rows) * self.type.row_nbytes(width)

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return _aligned(self.offset + self.nbytes)


class GgufWeights(NamedTuple):
    """Backbone tensors (ModelConfig.backbone_shapes) in a file, offsets from its beginning."""

    path: Path
    nbytes: int
    tensors: dict[str, GgufTensor]


def lay_out(tensors: Iterable[tuple[str, TensorType, tuple[int, ...]]]) -> list[GgufTensor]:
    """Tensors of these names, types and shapes one after the other."""
    placed, at = list[GgufTensor](), 0
    for tensor in tensors:
        placed.append(GgufTensor(*tensor, at))
        at = placed[-1].end
    return placed


def planned_tensors(config: ModelConfig, weights: GgufType) -> list[GgufTensor]:
    """The tensors of a backbone, in the order of ModelConfig.backbone_shapes."""
    types = tensor_types(config, weights)
    return lay_out(
        (gguf_name(name), types[name], shape) for name, shape in config.backbone_shapes().items()
    )


def encode_tensors(tensors: Iterable[GgufTensor]) -> bytes:
    """What a header says of its tensors, right before the data."""
    parts = []
    for tensor in tensors:
        name, sizes = tensor.name.encode(), tensor.shape[::-1]  # the fastest first
        parts.append(struct.pack("<Q", len(name)) + name)
        parts.append(struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes))
        parts.append(struct.pack("<IQ", tensor.type.number, tensor.offset))
    return b"".join(parts)


def locate(path: Path, nbytes: int, config: ModelConfig, weights: GgufType) -> GgufWeights:
    """The tensors of a backbone in its file of so many bytes. Raises BundleError if it is another."""
    planned = planned_tensors(config, weights)
    start, expected = nbytes - planned[-1].end, encode_tensors(planned)
    before = len(expected) + ALIGNMENT - 1  # with what aligns the data
    if start < before or start % ALIGNMENT:
        raise BundleError(
            f"{path}: {nbytes} bytes found, which are not a header and the {planned[-1].end} bytes "
            f"of this model's tensors; {EXPORT_AGAIN}"
        )
    found = _read(path, start - before, before)
    if not any(found.endswith(expected + bytes(padding)) for padding in range(ALIGNMENT)):
        raise BundleError(
            f"{path}: its header tells of other tensors than this model's; {EXPORT_AGAIN}"
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


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
