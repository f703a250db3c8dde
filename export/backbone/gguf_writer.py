"""Writes GGUF files, version 3, as a stream: header, metadata, then tensors piece by piece.

ggml's docs/gguf.md describes the format. This writer covers only what this project needs:
little-endian, alignment 32, tensors in the given order. The gguf package's writer opens files itself;
this one writes through BundleFile, which hashes and fsyncs, and holds only a few pieces in memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from stem_edge.export.backbone.gguf_values import TensorSource, encoder
from stem_edge.export.checkpoints.checkpoint import check_finite
from stem_edge.export.job.files import BundleFile
from stem_edge.export.quantization.streams import MatrixReader, RowSpan, all_rows
from stem_edge.export.tensor_files.gguf_tensor import decoded
from stem_edge.export.tensor_files.tensor import Stored, Tensor
from stem_edge.ggml.gguf_schema import ALIGNMENT, Value
from stem_edge.ggml.gguf_tensors import encode_tensors, lay_out
from stem_edge.ggml.library import Ggml
from stem_edge.numerics.matrix import whole
from stem_edge.numerics.quantize import U8

MAGIC, VERSION = b"GGUF", 3
UINT32, STRING = 4, 8  # GGUF's numbers for the types of metadata values that this writer supports


def write_gguf(
    file: BundleFile,
    ggml: Ggml,
    metadata: Mapping[str, Value],
    tensors: Sequence[TensorSource],
    weights: MatrixReader,
) -> None:
    """Write a complete GGUF file: header, metadata and all tensors.

    metadata: key -> value, in file order, general.architecture first. weights: reads the tensors' rows.
    Raises CheckpointError for NaN or infinity, ExportError for values that a tensor's type cannot hold.
    """
    file.write(encode_header(metadata, tensors))
    for tensor in tensors:
        file.align(ALIGNMENT)
        for piece in _pieces(tensor, ggml, weights):
            file.write(piece.data)
    file.align(ALIGNMENT)


def _pieces(tensor: TensorSource, ggml: Ggml, weights: MatrixReader) -> Iterator[U8]:
    """Yield the encoded bytes of a tensor in file order, some rows at a time."""
    if len(tensor.matrix.shape) == 1:
        values = check_finite(tensor.name, 0, whole(tensor.matrix))
        weights.count(tensor.name, values.nbytes)
        yield values.astype("<f4").view(np.uint8)
        return
    stored = tensor.matrix.stored if isinstance(tensor.matrix, Tensor) else None
    if stored is not None and stored.type == tensor.type:
        yield from _copied(tensor, stored, weights)
        return
    work = encoder(ggml, tensor)
    yield from weights.stream(tensor.name, all_rows([tensor.matrix]), work)


def _copied(tensor: TensorSource, stored: Stored, weights: MatrixReader) -> Iterator[U8]:
    """Yield a matrix's bytes unchanged from a GGUF checkpoint, some rows at a time."""

    def read(span: RowSpan) -> U8:
        codes = stored.read(*span[1:])
        values = check_finite(tensor.name, span[1], decoded(codes, stored.type))
        weights.count(tensor.name, values.nbytes)
        return codes.reshape(-1)

    return weights.in_order(read, weights.spans(all_rows([tensor.matrix])))


def encode_header(metadata: Mapping[str, Value], tensors: Sequence[TensorSource]) -> bytes:
    """Encode the GGUF header: magic, counts, metadata and the list of tensors, without padding."""
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        if isinstance(value, int):
            kind, data = UINT32, struct.pack("<I", value)
        else:
            kind, data = STRING, _string(value)
        parts += [_string(key), struct.pack("<I", kind), data]
    placed = lay_out((one.name, one.type, one.matrix.shape) for one in tensors)
    return b"".join([*parts, encode_tensors(placed)])


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
