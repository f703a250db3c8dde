"""Encodes graphs as ONNX files in protobuf's wire format, without the onnx package.

Field numbers are those of onnx.proto (onnx 1.17), wire types those of protobuf's encoding guide. Equal graphs give
equal bytes. Opset 21 and IR 10 are pinned, because onnxruntime reads older versions than the onnx package writes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from stem_edge.graph.ir import CONTRIB, Attribute, Graph, Node, Tensor, ValueInfo

OPSET, SCATTER_OPSET = 21, 24  # TensorScatter is newer
IR_VERSION = 10
VARINT, FIXED32, LENGTH = 0, 5, 2  # wire types
FLOAT, INT, STRING, TENSOR, INTS = 1, 2, 3, 4, 7  # AttributeProto.AttributeType
EXTERNAL = 1  # TensorProto.DataLocation
PACKED = "prepacked_0"  # onnxruntime's own key in a tensor's external_data


def encode(graph: Graph) -> bytes:
    opset = SCATTER_OPSET if any(node.op == "TensorScatter" for node in graph.nodes) else OPSET
    opsets = [_text(1, domain) + _int(2, number) for domain, number in (("", opset), (CONTRIB, 1))]
    return (
        _int(1, IR_VERSION)
        + _text(2, "stem-edge")
        + with_length(7, _graph(graph))
        + b"".join(with_length(8, opset) for opset in opsets)
    )


def _graph(graph: Graph) -> bytes:
    return b"".join(
        [
            *(with_length(1, _node(node)) for node in graph.nodes),
            _text(2, "backbone"),
            *(with_length(5, _tensor(tensor)) for tensor in graph.tensors.values()),
            *(with_length(11, _value(*item)) for item in graph.inputs.items()),
            *(with_length(12, _value(*item)) for item in graph.outputs.items()),
        ]
    )


def _node(node: Node) -> bytes:
    return (
        _texts(1, node.inputs)
        + _texts(2, node.outputs)
        + _text(3, node.outputs[0])
        + _text(4, node.op)
        + b"".join(with_length(5, _attribute(*item)) for item in node.attributes.items())
        + _text(7, node.domain)
    )


def _attribute(name: str, value: Attribute) -> bytes:
    match value:
        case int():
            kind, data = INT, _int(3, value)
        case float():
            kind, data = FLOAT, _varint(2 << 3 | FIXED32) + struct.pack("<f", value)
        case str():
            kind, data = STRING, _text(4, value)
        case Tensor():
            kind, data = TENSOR, with_length(5, _tensor(value))
        case tuple():
            kind, data = INTS, b"".join(_int(8, item) for item in value)
    return _text(1, name) + data + _int(20, kind)


def _tensor(tensor: Tensor) -> bytes:
    about = b"".join(_int(1, size) for size in tensor.dims) + _int(2, tensor.type)
    about += _text(8, tensor.name)
    if tensor.data is not None:
        return about + with_length(9, tensor.data)
    place = {"location": tensor.file, "offset": str(tensor.offset), "length": str(tensor.nbytes)}
    place |= {PACKED: tensor.packed} if tensor.packed else {}
    entries = (with_length(13, _text(1, key) + _text(2, value)) for key, value in place.items())
    return about + b"".join(entries) + _int(14, EXTERNAL)


def _value(name: str, value: ValueInfo) -> bytes:
    kind = _int(1, value.type)
    if value.shape is not None:
        dims = (_text(2, size) if isinstance(size, str) else _int(1, size) for size in value.shape)
        kind += with_length(2, b"".join(with_length(1, dim) for dim in dims))
    return _text(1, name) + with_length(2, with_length(1, kind))


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # protobuf writes negative numbers as 64-bit two's complement
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def _int(field: int, value: int) -> bytes:
    return _varint(field << 3 | VARINT) + _varint(value)


def with_length(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | LENGTH) + _varint(len(data)) + data


def _text(field: int, text: str) -> bytes:
    return with_length(field, text.encode())


def _texts(field: int, texts: Iterable[str]) -> bytes:
    return b"".join(_text(field, text) for text in texts)
