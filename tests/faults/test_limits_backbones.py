"""Limits of backbone files: what is just inside is taken, what is just outside is refused."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from gguf_files import BOOL, FLOAT32, UINT8, Tensor, array, gguf, number, strings, text
from onnx import TensorProto, helper

from stem_edge import gguf_file, onnx_check, onnx_expected, onnx_file, protobuf
from stem_edge.errors import BundleError
from stem_edge.export import linear
from stem_edge.gguf_file import GgufFile, parse_gguf
from stem_edge.graph_io import Value
from stem_edge.onnx_file import OnnxFile, Place, parse_onnx
from stem_edge.protobuf import Schema

PLACE = Path("backbone.gguf")

# GGUF


def refused(data: bytes, said: str) -> None:
    with pytest.raises(BundleError, match=said):
        parse_gguf(data, PLACE)


def read(data: bytes) -> GgufFile:
    return parse_gguf(data, PLACE)


@pytest.mark.parametrize("more", [0, 1])
def test_the_number_of_tensors(more: int) -> None:
    count = gguf_file.MAX_TENSORS + more
    tensors = [Tensor(str(n), (1,), 0, 32 * n) for n in range(count)]
    data = gguf([], tensors, bytes(32 * count))
    if more:
        refused(data, f"{count} tensors, but there is room for {count - 1}")
    else:
        assert len(read(data).tensors) == count


@pytest.mark.parametrize("more", [0, 1])
def test_the_length_of_a_header(more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    data = gguf([("k", text("x" * 200))])
    monkeypatch.setattr(gguf_file, "MAX_HEADER_NBYTES", 24 + 9 + 12 + 200 - more)
    if more:
        refused(data, "ends at byte 245, but the longest header at 244")
    else:
        assert read(data).metadata == {"k": "x" * 200}


def test_strings_of_all_keys_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "MAX_STRINGS", 5)
    assert read(gguf([("a", strings(["x"] * 3)), ("b", strings(["", ""]))])).metadata == {}
    refused(gguf([("a", strings(["x"] * 3)), ("b", strings([""] * 3))]), "3 strings in key 'b'")


def test_what_is_kept_of_all_keys_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "MAX_KEPT_VALUES", 5)
    monkeypatch.setattr(gguf_file, "MAX_KEPT_STRING_NBYTES", 8 + 3)
    three, two = array(UINT8, [1, 2, 3]), array(UINT8, [4, 5])
    keys = [("stem.a", three), ("stem.b", three), ("stem.c", two), ("general.d", array(BOOL, []))]
    found = read(gguf([*keys, ("e", text("abc")), ("f", text("abcd"))])).metadata
    assert found == {"stem.a": (1, 2, 3), "stem.c": (4, 5), "general.d": (), "e": "abc"}


@pytest.mark.parametrize("count", [0, 1])
def test_arrays_to_the_last_byte_of_the_file(count: int) -> None:
    whole = gguf([("k", array(FLOAT32, [0.5] * 2))])
    data = whole[: 24 + 9 + 16 + 8]
    assert read(data).nbytes == len(data)
    at = 24 + 9 + 8
    more = data[:at] + struct.pack("<Q", 3 + count) + data[at + 8 :]
    refused(more, f"{3 + count} values in key 'k', but there is room for 2")


def test_counts_to_the_last_byte_of_the_file() -> None:
    """The least that a key or a tensor takes: a name of one byte, and a value or size of one."""
    assert len(gguf([("k", number(UINT8, 1))]).rstrip(b"\0")) - 24 == gguf_file.LEAST_KEY_NBYTES
    entry = struct.pack("<Q1sIQIQ", 1, b"t", 1, 1, 0, 0)
    assert len(entry) == gguf_file.LEAST_TENSOR_NBYTES
    start = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)
    refused(start + entry[:-9], "1 tensors, but there is room for 0")
    assert list(read((start + entry).ljust(64, b"\0") + bytes(4)).tensors) == ["t"]


def test_a_file_is_read_in_pieces() -> None:
    asked = []

    class File:
        def read(self, nbytes: int) -> bytes:
            asked.append(nbytes)
            return bytes(nbytes)

    header = gguf_file._Header(File(), 1 << 30)  # type: ignore[arg-type]
    assert header.reach(1, "x") == gguf_file.PIECE_NBYTES == 65_536
    assert header.reach(65_536, "x") == 65_536
    assert header.reach(65_537, "x") == 131_072
    assert header.reach(300_000, "x") == 300_000
    assert asked == [65_536, 65_536, 168_928]


def test_the_limits_of_gguf_are_what_is_documented() -> None:
    assert (gguf_file.MAX_STRINGS, gguf_file.MAX_KEPT_VALUES) == (2_097_152, 65_536)
    assert gguf_file.MAX_KEPT_STRING_NBYTES == 1_048_576
    assert gguf_file.DEFAULT_ALIGNMENT == 32


def test_messages_of_damaged_headers() -> None:
    refused(gguf([("general.alignment", text("9" * 30))]), "is 99999999999999999999;")
    refused(b"GGUF" + struct.pack("<I", 0x30000), "it is big-endian")
    refused(b"GGUF" + struct.pack("<I", 0x30001), "version 196609")


# ONNX

SCHEMAS: dict[str, Schema] = {
    "StringStringEntryProto": onnx_file.ENTRY,
    "TensorProto": onnx_file.TENSOR,
    "AttributeProto": onnx_file.ATTRIBUTE,
    "NodeProto": onnx_file.NODE,
    "TensorShapeProto.Dimension": onnx_file.DIMENSION,
    "TensorShapeProto": onnx_file.SHAPE,
    "TypeProto.Tensor": onnx_file.TENSOR_TYPE,
    "TypeProto": onnx_file.TYPE,
    "ValueInfoProto": onnx_file.VALUE,
    "GraphProto": onnx_file.GRAPH,
    "OperatorSetIdProto": onnx_file.OPSET,
    "ModelProto": onnx_file.MODEL,
}
MOST = {
    "dims": 4, "ints": 4, "int32_data": 1024, "external_data": 4, "input": 4096, "output": 4096,
    "attribute": 16, "dim": 4, "node": 131_072, "initializer": 131_072, "opset_import": 8,
}  # fmt: skip
KINDS = {"int": (3, 5), "ints": (3, 5), "float": (2,), "text": (9, 12), "bytes": (11, 12)}


@pytest.mark.parametrize("message", SCHEMAS)
def test_schemas_are_those_of_onnx(message: str) -> None:
    """Numbers, names and types as ONNX has them; repeated where they may be, and how often."""
    descriptor: Any = onnx
    for name in message.split("."):
        descriptor = getattr(descriptor, name)
    for number_of, field in SCHEMAS[message].items():
        known = descriptor.DESCRIPTOR.fields_by_number[number_of]
        name = field.name.partition(":")[0]
        assert known.name in (name, f"dim_{name}")
        if not field.most:
            continue
        if isinstance(field.kind, str):
            assert known.type in (*KINDS[field.kind], 14 if field.kind == "int" else 0)
        else:
            assert SCHEMAS[known.message_type.full_name.removeprefix("onnx.")] is field.kind
        graphs = 131_072 if message == "GraphProto" else None
        expected = graphs or MOST.get(name, 1)
        assert field.most == (expected if known.is_repeated else 1)


def test_what_brings_code_or_other_files_is_known_by_name() -> None:
    refused_names = {
        (message, field.name)
        for message, schema in SCHEMAS.items()
        for field in schema.values()
        if not field.most
    }
    assert refused_names == {
        ("TensorProto", "segment"),
        *(("AttributeProto", name) for name in ("g: a subgraph", "tensors", "graphs: subgraphs")),
        *(("AttributeProto", n) for n in ("ref_attr_name", "sparse_tensor", "sparse_tensors")),
        *(("TypeProto", name) for name in ("sequence_type", "sparse_tensor_type")),
        ("GraphProto", "sparse_initializer"),
        *(("ModelProto", name) for name in ("training_info", "functions")),
    }


def graph(**parts: Any) -> OnnxFile:
    """What is read of a graph with these parts."""
    made = onnx.GraphProto(name="g")
    for name, values in parts.items():
        getattr(made, name).extend(values)
    return parse_onnx(helper.make_model(made, ir_version=10).SerializeToString())


def invalid(said: str, **parts: Any) -> None:
    with pytest.raises(ValueError, match=said):
        graph(**parts)


def tensor(nbytes: int = 4, **fields: Any) -> TensorProto:
    every: dict[str, Any] = {"name": "t", "data_type": 2, "dims": [nbytes]} | fields
    return TensorProto(**every)


def outside(**entries: str) -> TensorProto:
    """A tensor of 4 bytes in a file."""
    made = tensor(data_location=1)
    for key, value in ({"location": "f", "offset": "64", "length": "4"} | entries).items():
        made.external_data.add(key=key, value=value)
    return made


def test_elements() -> None:
    widths: dict[int, tuple[str, float]] = {
        1: ("float32", 4),
        2: ("uint8", 1),
        3: ("int8", 1),
        6: ("int32", 4),
    }
    widths |= {7: ("int64", 8), 10: ("float16", 2), 21: ("uint4", 0.5)}
    for kind in range(24):
        if kind in widths:
            name, width = widths[kind]
            raw = bytes(math.ceil(3 * width))
            found = graph(initializer=[tensor(3, data_type=kind, raw_data=raw)])
            assert found.tensors["t"][:3] == ("t", name, (3,))
        else:
            invalid(f"element type {kind};", initializer=[tensor(data_type=kind, raw_data=b"")])


def test_the_size_of_a_tensor_in_a_graph() -> None:
    assert graph(initializer=[tensor(1024, raw_data=bytes(1024))]).tensors["t"].place is None
    invalid("1024 at most", initializer=[tensor(1025, raw_data=bytes(1025))])
    invalid("has 3 bytes in the graph", initializer=[tensor(raw_data=bytes(3))])
    invalid("has 5 bytes in the graph", initializer=[tensor(raw_data=bytes(5))])
    invalid("has 0 bytes in the graph", initializer=[tensor()])
    some = tensor(2, data_type=6, int32_data=[1, 2])
    assert graph(initializer=[some]).tensors["t"] == ("t", "int32", (2,), None, None)
    invalid(
        "has 12 bytes", initializer=[tensor(2, data_type=6, int32_data=[1, 2], raw_data=b"1234")]
    )
    invalid(r"dims \[0\]", initializer=[tensor(0, raw_data=b"")])
    assert graph(initializer=[tensor(dims=[1] * 4, raw_data=b"1")]).tensors["t"].dims == (1,) * 4
    assert graph(initializer=[tensor(dims=[], raw_data=b"1")]).tensors["t"].dims == ()


def test_the_sizes_that_a_tensor_holds() -> None:
    raw = struct.pack("<3q", 1, -2, 1 << 40)
    found = graph(initializer=[tensor(3, data_type=7, raw_data=raw)])
    assert found.tensors["t"].sizes == (1, -2, 1 << 40)
    found = graph(initializer=[tensor(2, data_type=1, raw_data=bytes(8))])
    assert found.tensors["t"].sizes is None


def test_the_place_of_a_tensor() -> None:
    assert graph(initializer=[outside()]).tensors["t"].place == ("f", 64, 4)
    digits = "0" * 18
    found = graph(initializer=[outside(offset=digits + "9")]).tensors["t"]
    assert (found.place, found.sizes) == (("f", 9, 4), None)
    invalid("has offset '00000000000000000009", initializer=[outside(offset=digits + "09")])
    invalid("its length is 5", initializer=[outside(length="5")])
    invalid("has external data of", initializer=[outside(checksum="x")])
    both = outside()
    both.raw_data = b"1234"
    invalid("both in the graph and", initializer=[both])


def node(**fields: Any) -> onnx.NodeProto:
    return onnx.NodeProto(**({"op_type": "Abs", "input": ["x"], "output": ["y"]} | fields))


def test_names() -> None:
    for length, valid in ((1, True), (256, True), (257, False)):
        for fields in (
            {"input": ["n" * length]},
            {"output": ["n" * length]},
            {"op_type": "n" * length},
            {"domain": "n" * length},
            {"attribute": [helper.make_attribute("n" * length, 1)]},
        ):
            if valid:
                assert len(graph(node=[node(**fields)]).nodes) == 1
            else:
                invalid("expected 1 to 256 plain characters", node=[node(**fields)])
    invalid("an operator is ''", node=[onnx.NodeProto(output=["y"])])
    invalid("an attribute is ''", node=[node(attribute=[helper.make_attribute("", 1)])])
    invalid("name of a value", node=[node(input=["a\tb"])])
    assert graph(node=[node(input=["", "x"])]).nodes[0].inputs == ["", "x"]


def test_attributes() -> None:
    every = {"f": 0.5, "i": -3, "s": "text", "t": tensor(raw_data=b"1234")}
    made = [helper.make_attribute(name, value) for name, value in every.items()]
    found = graph(node=[node(attribute=made)]).nodes[0]
    assert found.attributes.pop("t")[:3] == ("t", "uint8", (4,))
    assert found.attributes == {"f": 0.5, "i": -3, "s": "text"}
    assert (found.operator, found.domain, found.outputs) == ("Abs", "", ["y"])
    several = [helper.make_attribute("perm", [1, 0])]
    assert graph(node=[node(attribute=several)]).nodes[0].attributes == {"perm": (1, 0)}
    invalid("more than 4", node=[node(attribute=[helper.make_attribute("perm", [1] * 5)])])
    sixteen = [helper.make_attribute(f"a{n}", n) for n in range(17)]
    assert len(graph(node=[node(attribute=sixteen[:16])]).nodes[0].attributes) == 16
    invalid("more than 16 attribute", node=[node(attribute=sixteen)])
    proto: Any = onnx.AttributeProto
    other = proto(name="a", type=2, i=1, f=0.5)
    invalid("or another one", node=[node(attribute=[other])])
    for kind in (0, 1, 3, 4, 5, 7):
        untyped = proto(name="a", type=kind, i=1)
        invalid(f"no value of its type {kind}", node=[node(attribute=[untyped])])
    invalid("lies in a file", node=[node(attribute=[helper.make_attribute("a", outside())])])
    twice = [helper.make_attribute("a", 1), helper.make_attribute("a", 2)]
    invalid("'a' is there more than once", node=[node(attribute=twice)])


def test_inputs_and_outputs() -> None:
    values = [
        helper.make_tensor_value_info("a", TensorProto.FLOAT, [1, "T", 3, 4]),
        helper.make_tensor_value_info("b", TensorProto.INT64, []),
        helper.make_tensor_value_info("c", TensorProto.UINT8, None),
    ]
    expected = {
        "a": Value("float32", (1, "T", 3, 4)),
        "b": Value("int64", ()),
        "c": Value("uint8", None),
    }
    assert graph(input=values).inputs == expected
    assert graph(output=values).outputs == expected
    invalid("more than 4 dim", input=[helper.make_tensor_value_info("a", 1, [1] * 5)])
    invalid("a dimension without size", input=[helper.make_tensor_value_info("a", 1, [None])])
    invalid("a dimension is", input=[helper.make_tensor_value_info("a", 1, ["x" * 257])])
    invalid("element type 0", output=[onnx.ValueInfoProto(name="a")])
    invalid("an input or output is ''", output=[onnx.ValueInfoProto()])
    invalid("'b' is there more than once", input=[values[0], values[1], values[1], values[0]])


def test_versions() -> None:
    made = helper.make_model(onnx.GraphProto(), ir_version=9)
    made.opset_import.add(domain="d", version=3)
    found = parse_onnx(made.SerializeToString())
    assert (found.ir_version, found.opsets["d"]) == (9, 3)
    bare = parse_onnx(b"\x08\x00\x3a\x00\x42\x00")
    assert bare == (0, {"": 0}, [], {}, {}, {})


def test_the_limits_of_graphs_are_what_is_documented() -> None:
    assert (onnx_check.MAX_GRAPH_NBYTES, onnx_check.LAYER_NBYTES) == (16_777_216, 65_536)
    assert (onnx_check.ALIGNMENT, onnx_check.IR_VERSION) == (64, 10)
    assert protobuf.MAX_VARINT_NBYTES == 10
    assert (onnx_expected.NODES_OF_LAYER, onnx_expected.NODES_BESIDE_LAYERS) == (96, 16)
    assert onnx_expected.NODES_OF_PORTABLE_LAYER == 160
    assert onnx_expected.NODES_BESIDE_PORTABLE_LAYERS == 48
    assert onnx_expected.PIECE_VALUES == linear.SPLIT_VALUES == 16_777_216
    assert (onnx_expected.NODES_OF_PIECE, onnx_expected.NODES_OF_PORTABLE_PIECE) == (2, 8)


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "backbone.onnx.data"
    path.write_bytes(bytes(200))
    yield path


def test_weights_may_touch_and_not_overlap(weights: Path) -> None:
    one, two = Place("f", 0, 64), Place("f", 64, 64)
    for places in ([], [one, two], [two, one]):
        onnx_check._check_data(weights, 200, places)
    for places in ([one._replace(nbytes=65), two], [two, Place("f", 0, 128)], [one, one]):
        with pytest.raises(BundleError, match=r"overlap; copy the bundle"):
            onnx_check._check_data(weights, 200, places)
    for nbytes in (199, 201):
        with pytest.raises(BundleError, match=f"200 bytes found, {nbytes} expected"):
            onnx_check._check_data(weights, nbytes, [])
