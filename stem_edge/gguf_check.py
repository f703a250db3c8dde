"""Whether backbone.gguf is the backbone that the manifest of its bundle describes.

ggml takes a tensor's type and shape from whoever builds the graph, and ends the process if they do
not fit. So they are compared with the model, one by one, before anything is built.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import takewhile
from operator import eq

from stem_edge.bundle import GgufFormat, Manifest
from stem_edge.errors import BundleError
from stem_edge.ggml_types import TensorType
from stem_edge.gguf_file import ALIGNMENT_KEY, DEFAULT_ALIGNMENT, EXPORT_AGAIN, GgufFile
from stem_edge.gguf_schema import (
    ALIGNMENT,
    ARCHITECTURE,
    QUANTIZATION_VERSION,
    TABLES_KEY,
    Value,
    gguf_name,
    model_metadata,
    tables_hash,
    tensor_types,
)

ARCHITECTURE_KEY = "general.architecture"
QUANTIZATION_KEY = "general.quantization_version"
SHOWN_DIFFERENCES = 3
SHOWN_CHARACTERS = 80


def check_backbone(file: GgufFile, manifest: Manifest) -> None:
    """Raises BundleError unless metadata and tensors are those of the manifest's model.

    Keys that are not `stem.*` may be there as well, other `stem.*` keys and tensors may not.
    """
    if manifest.gguf is None:
        raise BundleError(
            f"{file.path}: the bundle's manifest has no backbone for ggml; {EXPORT_AGAIN}"
        )
    differences = [*_of_metadata(file, manifest), *_of_tensors(file, manifest, manifest.gguf)]
    if differences:
        more = len(differences) - SHOWN_DIFFERENCES
        said = "; ".join(differences[:SHOWN_DIFFERENCES]) + (
            f"; and {more} more" if more > 0 else ""
        )
        raise BundleError(
            f"{file.path}: not the backbone that the bundle's manifest describes ({said}); copy the "
            f"bundle again or {EXPORT_AGAIN}"
        )


def _of_metadata(file: GgufFile, manifest: Manifest) -> Iterator[str]:
    expected: dict[str, Value] = {ARCHITECTURE_KEY: ARCHITECTURE, **model_metadata(manifest.model)}
    if manifest.model.stem_layers:
        expected[TABLES_KEY] = tables_hash(manifest.files)
    found = {ALIGNMENT_KEY: DEFAULT_ALIGNMENT, **file.metadata}
    expected[ALIGNMENT_KEY] = ALIGNMENT
    if QUANTIZATION_KEY in found:
        expected[QUANTIZATION_KEY] = QUANTIZATION_VERSION
    for key, value in expected.items():
        if key not in found:
            yield f"{key} is missing"
        elif not _same(found[key], value):
            yield f"{key} is {_shown(found[key], value)}, expected {_shown(value, found[key])}"
    prefix = ARCHITECTURE + "."
    for key in sorted(found.keys() - expected.keys()):
        if key.startswith(prefix):
            yield f"{key!r} is no key of this model"


def _same(found: Value, expected: Value) -> bool:
    """Whether a value is stored as it must be: floats as float32, and True is not 1."""
    if isinstance(expected, float):
        (expected,) = struct.unpack("<f", struct.pack("<f", expected))
    if isinstance(found, tuple) and isinstance(expected, tuple):
        return found == expected and bool not in map(type, found)
    return type(found) is type(expected) and found == expected


def _shown(value: Value, other: Value) -> str:
    """A value on one line; of a long one, what is around the first difference from the other."""
    text, against = ascii(value), ascii(other)
    if len(text) <= SHOWN_CHARACTERS:
        return text
    same: int = sum(takewhile(bool, map(eq, text, against)))
    start = max(0, same - SHOWN_CHARACTERS // 2)
    end = start + SHOWN_CHARACTERS
    return "..." * (start > 0) + text[start:end] + "..." * (end < len(text))


def _of_tensors(file: GgufFile, manifest: Manifest, format: GgufFormat) -> Iterator[str]:
    shapes = manifest.model.backbone_shapes()
    types = tensor_types(manifest.model, format.weights)
    names = {gguf_name(name): name for name in shapes}
    for stored, name in names.items():
        if (tensor := file.tensors.get(stored)) is None:
            yield f"tensor {stored} is missing"
        elif (tensor.type, tensor.shape) != (types[name], shapes[name]):
            found, expected = _kind(tensor.type, tensor.shape), _kind(types[name], shapes[name])
            yield f"tensor {stored} is {found}, expected {expected}"
    for stored in file.tensors:
        if stored not in names:
            yield f"tensor {stored!r} is none of this model's"


def _kind(type: TensorType, shape: tuple[int, ...]) -> str:
    return f"{type.name} {list(shape)}"
