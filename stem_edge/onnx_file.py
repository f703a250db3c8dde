"""Reading .onnx files: of the format, no more than the graphs that stem_edge.export.graph writes.

What else ONNX has is refused by its name, above all what could bring more code or other files in:
functions, training, bodies of loops and branches, sparse tensors. Weights are not read: a tensor
here is what the file says of it.
"""

from __future__ import annotations

import struct
from math import prod
from typing import Any, NamedTuple

from stem_edge.graph_io import Value, Values
from stem_edge.protobuf import Field, Message, Schema, decode

MANY = 1 << 17  # a graph for prompts has about 60 nodes a layer
MAX_RANK = 4
MAX_NODE_VALUES = 1 << 12  # inputs of a Concat: a head in pieces
MAX_NODE_ATTRIBUTES = 16
MAX_NAME = 256
# Tensors of up to 256 bytes lie in the graph itself.
MAX_INLINE_NBYTES = 1 << 10
START = b"\x08"  # the tag of the IR version, which writers put first
EXTERNAL_KEYS = ("location", "offset", "length")
EXTERNAL = 1  # of TensorProto.DataLocation
MAX_DIGITS = 19

# Element type of ONNX -> its name and bits.
ELEMENTS = {
    1: ("float32", 32),
    2: ("uint8", 8),
    3: ("int8", 8),
    6: ("int32", 32),
    7: ("int64", 64),
    10: ("float16", 16),
    21: ("uint4", 4),
}
# Attribute type of ONNX -> the field that has the value.
ATTRIBUTE_FIELDS = {1: "f", 2: "i", 3: "s", 4: "t", 7: "ints"}

ENTRY: Schema = {1: Field("key", "text"), 2: Field("value", "text")}
TENSOR: Schema = {
    1: Field("dims", "ints", MAX_RANK),
    2: Field("data_type", "int"),
    3: Field("segment", "bytes", 0),
    5: Field("int32_data", "ints", MAX_INLINE_NBYTES),
    8: Field("name", "text"),
    9: Field("raw_data", "bytes"),
    13: Field("external_data", ENTRY, len(EXTERNAL_KEYS) + 1),
    14: Field("data_location", "int"),
}
ATTRIBUTE: Schema = {
    1: Field("name", "text"),
    2: Field("f", "float"),
    3: Field("i", "int"),
    4: Field("s", "text"),
    5: Field("t", TENSOR),
    6: Field("g: a subgraph", "bytes", 0),
    8: Field("ints", "ints", MAX_RANK),
    10: Field("tensors", "bytes", 0),
    11: Field("graphs: subgraphs", "bytes", 0),
    20: Field("type", "int"),
    21: Field("ref_attr_name", "bytes", 0),
    22: Field("sparse_tensor", "bytes", 0),
    23: Field("sparse_tensors", "bytes", 0),
}
NODE: Schema = {
    1: Field("input", "text", MAX_NODE_VALUES),
    2: Field("output", "text", MAX_NODE_VALUES),
    3: Field("name", "text"),
    4: Field("op_type", "text"),
    5: Field("attribute", ATTRIBUTE, MAX_NODE_ATTRIBUTES),
    7: Field("domain", "text"),
}
DIMENSION: Schema = {1: Field("value", "int"), 2: Field("param", "text")}
SHAPE: Schema = {1: Field("dim", DIMENSION, MAX_RANK)}
TENSOR_TYPE: Schema = {1: Field("elem_type", "int"), 2: Field("shape", SHAPE)}
TYPE: Schema = {
    1: Field("tensor_type", TENSOR_TYPE),
    4: Field("sequence_type", "bytes", 0),
    8: Field("sparse_tensor_type", "bytes", 0),
}
VALUE: Schema = {1: Field("name", "text"), 2: Field("type", TYPE)}
GRAPH: Schema = {
    1: Field("node", NODE, MANY),
    2: Field("name", "text"),
    5: Field("initializer", TENSOR, MANY),
    11: Field("input", VALUE, MANY),
    12: Field("output", VALUE, MANY),
    15: Field("sparse_initializer", "bytes", 0),
}
OPSET: Schema = {1: Field("domain", "text"), 2: Field("version", "int")}
MODEL: Schema = {
    1: Field("ir_version", "int"),
    2: Field("producer_name", "text"),
    3: Field("producer_version", "text"),
    7: Field("graph", GRAPH),
    8: Field("opset_import", OPSET, 8),
    20: Field("training_info", "bytes", 0),
    25: Field("functions", "bytes", 0),
}


class Place(NamedTuple):
    """Where the bytes of a tensor lie in a file beside the graph."""

    location: str
    offset: int
    nbytes: int


class Tensor(NamedTuple):
    """A tensor whose bytes are exactly as many as its type and dims say."""

    name: str
    type: str
    dims: tuple[int, ...]
    place: Place | None  # None: in the graph itself
    sizes: tuple[int, ...] | None  # the values, if they are integers in the graph itself


class Node(NamedTuple):
    """An operator."""

    operator: str
    domain: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any]  # name -> float, int, str or Tensor


class OnnxFile(NamedTuple):
    """What a file says."""

    ir_version: int
    opsets: dict[str, int]  # domain -> version
    nodes: list[Node]
    tensors: dict[str, Tensor]
    inputs: Values
    outputs: Values


def parse_onnx(data: bytes) -> OnnxFile:
    """Read a file's bytes. Raises ValueError of one line."""
    if data[:1] != START:
        raise ValueError(f"{len(data)} bytes that begin with {data[:8]!a}; expected an ONNX file")
    model = decode(data, MODEL, "the model")
    if "graph" not in model:
        raise ValueError(f"{len(data)} bytes have no graph in them")
    graph = model["graph"]
    return OnnxFile(
        ir_version=model.get("ir_version", 0),
        opsets=_unique([(o.get("domain", ""), o.get("version", 0)) for o in model["opset_import"]]),
        nodes=[_node(node) for node in graph["node"]],
        tensors=_unique([(t.name, t) for t in map(_tensor, graph["initializer"])]),
        inputs=_unique([_io(value) for value in graph["input"]]),
        outputs=_unique([_io(value) for value in graph["output"]]),
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for at, name in enumerate(names) if name in names[:at])
        raise ValueError(f"{twice!r} is there more than once")
    return found


def _name(found: str, what: str) -> str:
    if not (1 <= len(found) <= MAX_NAME and found.isprintable()):
        raise ValueError(f"{what} is {found[:40]!a}; expected 1 to {MAX_NAME} plain characters")
    return found


def _node(node: Message) -> Node:
    names = [name for name in (*node["input"], *node["output"]) if name]
    for name in names:
        _name(name, "the name of a value")
    attributes = [_attribute(attribute) for attribute in node["attribute"]]
    return Node(
        operator=_name(node.get("op_type", ""), "an operator"),
        domain=_name(node["domain"], "a domain") if node.get("domain") else "",
        inputs=node["input"],
        outputs=node["output"],
        attributes=_unique(attributes),
    )


def _attribute(attribute: Message) -> tuple[str, Any]:
    name, kind = _name(attribute.get("name", ""), "an attribute"), attribute.get("type", 0)
    field = ATTRIBUTE_FIELDS.get(kind)
    given = {field for field, value in attribute.items() if value != []}
    if field is None or field not in given or given - {"name", "type", field}:
        raise ValueError(f"attribute {name!r} has no value of its type {kind}, or another one")
    value = attribute[field]
    if field == "ints":
        return name, tuple(value)
    value = _tensor(value) if field == "t" else value
    if isinstance(value, Tensor) and value.place is not None:
        raise ValueError(f"the tensor in attribute {name!r} lies in a file")
    return name, value


def _io(value: Message) -> tuple[str, Value]:
    name = _name(value.get("name", ""), "an input or output")
    tensor = value.get("type", {}).get("tensor_type", {})
    kind, _ = _element(tensor.get("elem_type", 0), name)
    if "shape" not in tensor:
        return name, Value(kind, None)
    return name, Value(kind, tuple(_size(one, name) for one in tensor["shape"]["dim"]))


def _size(dimension: Message, name: str) -> int | str:
    if len(dimension) != 1:
        raise ValueError(f"{name!r} has a dimension without size, or with two")
    found: int | str = next(iter(dimension.values()))
    return _name(found, "a dimension") if isinstance(found, str) else found


def _element(kind: int, name: str) -> tuple[str, int]:
    if kind not in ELEMENTS:
        known = ", ".join(f"{number} ({text})" for number, (text, _) in ELEMENTS.items())
        raise ValueError(f"{name!r} has element type {kind}; expected one of {known}")
    return ELEMENTS[kind]


def _tensor(tensor: Message) -> Tensor:
    """A tensor, wherever it is in the graph."""
    name = _name(tensor.get("name", ""), "a tensor")
    kind, bits = _element(tensor.get("data_type", 0), name)
    dims = tuple(tensor["dims"])
    if min(dims, default=1) < 1:
        raise ValueError(f"tensor {name!r} has dims {list(dims)}; expected positive ones")
    # These are Python's integers: no product is too great to be compared with what is there.
    nbytes = -(-prod(dims) * bits // 8)
    entries, location = tensor["external_data"], tensor.get("data_location", 0)
    inline = len(tensor["int32_data"]) * bits // 8 + len(tensor.get("raw_data", b""))
    if not entries and location != EXTERNAL:
        if inline != nbytes or inline > MAX_INLINE_NBYTES:
            raise ValueError(
                f"tensor {name!r} of {nbytes} bytes has {inline} bytes in the graph; expected all, "
                f"{MAX_INLINE_NBYTES} at most"
            )
        return Tensor(name, kind, dims, None, _sizes(kind, tensor.get("raw_data", b"")))
    if inline or location != EXTERNAL:
        raise ValueError(f"tensor {name!r} has values both in the graph and in a file, or nowhere")
    return Tensor(name, kind, dims, _place(name, entries, nbytes), None)


def _sizes(kind: str, raw: bytes) -> tuple[int, ...] | None:
    return struct.unpack(f"<{len(raw) // 8}q", raw) if kind == "int64" and raw else None


def _place(name: str, entries: list[Message], nbytes: int) -> Place:
    found = _unique([(entry.get("key", ""), entry.get("value", "")) for entry in entries])
    if found.keys() != set(EXTERNAL_KEYS):
        raise ValueError(
            f"tensor {name!r} has external data of {ascii(sorted(found))[:80]}; expected "
            f"{', '.join(EXTERNAL_KEYS)}"
        )
    numbers = []
    for key in EXTERNAL_KEYS[1:]:
        text = found[key]
        if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
            raise ValueError(f"tensor {name!r} has {key} {text[:40]!a}; expected a number")
        numbers.append(int(text))
    if numbers[1] != nbytes:
        raise ValueError(f"tensor {name!r} takes {nbytes} bytes, its length is {numbers[1]}")
    return Place(found["location"], *numbers)
