"""GGUF files as bytes, put together by hand: for the tests of what reads them.

Nothing here is taken from the reader or from a library, so that a mistake of theirs shows.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from stem_edge.bundle import Manifest
from stem_edge.ggml_types import TensorType
from stem_edge.gguf_schema import gguf_name, model_metadata, tables_hash, tensor_types

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = range(10)
UINT64, INT64, FLOAT64 = 10, 11, 12
CODES = dict(zip([0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12], "BbHhIifBQqd", strict=True))


class Tensor(NamedTuple):
    """What a header says of a tensor: sizes as in the file, [inputs, outputs]."""

    name: str
    sizes: Sequence[int]
    type: int
    offset: int  # in the data


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def number(kind: int, value: float) -> bytes:
    """A value with its type."""
    return struct.pack("<I" + CODES[kind], kind, value)


def text(value: str | bytes) -> bytes:
    """A string with its type."""
    return struct.pack("<I", STRING) + string(value)


def array(kind: int, values: Sequence[float]) -> bytes:
    """An array of numbers with its type."""
    return array_start(kind, len(values)) + struct.pack(f"<{len(values)}{CODES[kind]}", *values)


def strings(values: Sequence[str | bytes]) -> bytes:
    """An array of strings with its type."""
    return array_start(STRING, len(values)) + b"".join(map(string, values))


def array_start(kind: int, count: int) -> bytes:
    return struct.pack("<IIQ", ARRAY, kind, count)


def tensor_entry(tensor: Tensor) -> bytes:
    sizes = struct.pack(f"<I{len(tensor.sizes)}Q", len(tensor.sizes), *tensor.sizes)
    return string(tensor.name) + sizes + struct.pack("<IQ", tensor.type, tensor.offset)


def padded(data: bytes, alignment: int = 32) -> bytes:
    return data + b"\0" * (-len(data) % alignment)


def gguf(
    keys: Sequence[tuple[str | bytes, bytes]] = (),
    tensors: Sequence[Tensor] = (),
    data: bytes = b"",
    alignment: int = 32,
) -> bytes:
    """A file: keys with their values (number, text, array, strings), tensors and their data."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    header += b"".join(string(key) + value for key, value in keys)
    header += b"".join(map(tensor_entry, tensors))
    return padded(header, alignment) + data


def value(of: str | float | tuple[int, ...]) -> bytes:
    """A value of the schema with the type that the schema gives it."""
    if isinstance(of, str):
        return text(of)
    if isinstance(of, tuple):
        return array(UINT32, of)
    return number(FLOAT32 if isinstance(of, float) else UINT32, of)


def backbone_keys(manifest: Manifest) -> dict[str, bytes]:
    """Key -> value of the file that belongs to a manifest."""
    keys = {"general.architecture": text("stem"), "general.alignment": number(UINT32, 32)}
    keys |= {key: value(of) for key, of in model_metadata(manifest.model).items()}
    if manifest.model.stem_layers:
        keys["stem.tables.sha256"] = text(tables_hash(manifest.files))
    return keys


def backbone_tensors(manifest: Manifest) -> dict[str, tuple[tuple[int, ...], TensorType]]:
    """Name in the file -> shape and type of the file that belongs to a manifest."""
    if manifest.gguf is None:
        raise ValueError("a manifest without a backbone for ggml")
    types = tensor_types(manifest.model, manifest.gguf.weights)
    shapes = manifest.model.backbone_shapes()
    return {gguf_name(name): (shape, types[name]) for name, shape in shapes.items()}


def backbone(
    keys: Mapping[str, bytes], tensors: Mapping[str, tuple[tuple[int, ...], TensorType]]
) -> bytes:
    """A file of these; all values are zero."""
    entries, data = [], b""
    for name, (shape, type) in tensors.items():
        entries.append(Tensor(name, shape[::-1], type.number, len(data)))
        data += padded(bytes(prod(shape) // type.block * type.nbytes))
    return gguf(list(keys.items()), entries, data)
