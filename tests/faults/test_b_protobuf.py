"""Catalogue B1, B12, B14 and B16: the wire format below graphs, and what operators are given.

Whole graphs: test_b_onnx.py.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from hostile_graphs import attribute, change_refused, external, graph_refused, node
from onnx import TensorProto, helper

import stem_edge
from stem_edge.graph_io import graph_file
from stem_edge.protobuf import Field, Schema, decode

INNER: Schema = {1: Field("word", "text")}
SCHEMA: Schema = {
    1: Field("number", "int"),
    2: Field("sizes", "ints", 3),
    3: Field("share", "float"),
    4: Field("inner", INNER, 2),
    5: Field("raw", "bytes"),
    6: Field("loops", "bytes", 0),
}


def read(data: bytes) -> dict[str, Any]:
    return decode(data, SCHEMA, "it")


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", {}),
        (b"\x08\x96\x01", {"number": 150}),
        (b"\x08" + b"\xff" * 9 + b"\x01", {"number": -1}),
        (b"\x08" + b"\x80" * 9 + b"\x00", {"number": 0}),
        (b"\x88\x80\x00\x05", {"number": 5}),
        (b"\x10\x01\x12\x02\x02\x03", {"sizes": [1, 2, 3]}),
        (b"\x12\x00", {"sizes": []}),
        (b"\x1d" + struct.pack("<f", 0.5), {"share": 0.5}),
        (b"\x22\x03\x0a\x01x\x22\x00", {"inner": [{"word": "x"}, {}]}),
        (b"\x2a\x02\x00\xff", {"raw": b"\x00\xff"}),
    ],
)
def test_messages(data: bytes, found: dict[str, Any]) -> None:
    assert read(data) == {"sizes": [], "inner": []} | found


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x08", "an integer at byte 1 does not end"),
        (b"\x08\x80", "an integer at byte 1 does not end"),
        (b"\x80" * 11, "an integer at byte 0 does not end"),
        (b"\x08" + b"\x80" * 10 + b"\x00", "an integer at byte 1 does not end"),
        (b"\x08" + b"\xff" * 9 + b"\x02", "an integer at byte 1 has more than 64 bits"),
        (b"\x00", "it has field 0 at byte 0"),
        (b"\x38\x01", "it has field 7 at byte 0"),
        (b"\x32\x00", "it has loops (field 6) at byte 0"),
        (b"\x0a\x00", "number at byte 1 has wire type 2, expected 0"),
        (b"\x09" + bytes(8), "number at byte 1 has wire type 1, expected 0"),
        (b"\x23\x24", "inner at byte 1 has wire type 3, expected 2"),
        (b"\x2c", "raw at byte 1 has wire type 4, expected 2"),
        (b"\x0f", "number at byte 1 has wire type 7, expected 0"),
        (b"\x08\x01\x08\x02", "it has number once more at byte 2"),
        (b"\x10\x01" * 4, "it has more than 3 sizes at byte 6"),
        (b"\x12\x04\x01\x02\x03\x04", "sizes has more than 3 values"),
        (b"\x12\x02\x01\x80\x01", "an integer at byte 3 does not end"),
        (b"\x22\x00" * 3, "it has more than 2 inner at byte 4"),
        (b"\x1d\0\0\0", "share ends at byte 5, but what it is in at 4"),
        (b"\x2a\x05abcd", "raw ends at byte 7, but what it is in at 6"),
        (b"\x22\x03\x0a\x02x", "word ends at byte 6, but what it is in at 5"),
        (b"\x2a" + b"\xff" * 9 + b"\x01", "raw ends at byte 18446744073709551626"),
        (b"\x22\x03\x0a\x01\xff", "word at byte 4 is not UTF-8"),
    ],
)
def test_b1_damage_of_the_wire_format(data: bytes, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        read(data)
    assert said in str(caught.value)


def _nested(field: int, depth: int) -> bytes:
    data = b""
    for _ in range(depth):
        data = bytes([field << 3 | 2]) + _varint(len(data)) + data
    return data


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


@pytest.mark.parametrize("field", [5, 6, 7])
def test_b16_graphs_in_graphs(tiny_bundle: Path, field: int) -> None:
    """Ten thousand levels: of attributes' subgraphs, and of fields that hold themselves."""
    inner = _nested(field, 10_000)
    node_of_it = b"\x0a" + _varint(len(inner)) + inner
    graph_refused(tiny_bundle, "late", b"\x08\x0a\x3a" + _varint(len(node_of_it)) + node_of_it)


def test_b16_groups(tiny_bundle: Path) -> None:
    graph_refused(tiny_bundle, "late", b"\x08\x0a" + b"\x3b" * 10_000, "wire type 3")


@pytest.mark.slow
def test_b16_many_small_fields(tiny_bundle: Path) -> None:
    """As many as the file may have: refused at the first that is one too many."""
    many = b"\x0a\x00" * ((1 << 19) - 8)
    graph_refused(tiny_bundle, "late", b"\x08\x0a\x3a" + _varint(len(many)) + many)


# Operators


@pytest.fixture(scope="module")
def quantized(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a graph for prompts."""
    out = tmp_path_factory.mktemp("quantized") / "out"
    stem_edge.export_bundle(
        tiny_checkpoint, out, backbone="int8", tables="int8", prefill_graph=True, asymmetric=True
    )
    return out


def _set(operator: str, name: str, value: float | str) -> Callable[[onnx.ModelProto], Any]:
    def change(model: onnx.ModelProto) -> None:
        attribute(model, operator, name).CopyFrom(helper.make_attribute(name, value))

    return change


@pytest.mark.parametrize(
    ("operator", "name", "value"),
    [
        ("MatMulNBits", "K", 64),
        ("MatMulNBits", "K", 0),
        ("MatMulNBits", "K", 2**40),
        ("MatMulNBits", "N", 1 << 30),
        ("MatMulNBits", "N", -1),
        ("MatMulNBits", "bits", 4),
        ("MatMulNBits", "bits", 0),
        ("MatMulNBits", "block_size", 0),
        ("MatMulNBits", "block_size", 24),
        ("MatMulNBits", "block_size", 256),
        ("MatMulNBits", "accuracy_level", 9),
        ("MatMulNBits", "bits", 8.0),
        ("MatMulNBits", "bits", "8"),
        ("GroupQueryAttention", "num_heads", 0),
        ("GroupQueryAttention", "num_heads", 1 << 30),
        ("GroupQueryAttention", "kv_num_heads", 4),
        ("GroupQueryAttention", "do_rotary", 0),
        ("GroupQueryAttention", "rotary_interleaved", 2),
        ("GroupQueryAttention", "scale", math.nan),
        ("GatherBlockQuantized", "block_size", 16),
        ("GatherBlockQuantized", "bits", 4),
        ("GatherBlockQuantized", "gather_axis", 1),
        ("SkipSimplifiedLayerNormalization", "epsilon", math.nan),
        ("SkipSimplifiedLayerNormalization", "epsilon", -1.0),
        ("QuickGelu", "alpha", 2.0),
    ],
)
def test_b14_attributes_that_do_not_fit_the_weights(
    quantized: Path, operator: str, name: str, value: float | str
) -> None:
    """onnxruntime packs a matrix as far as its attributes say, not as far as its bytes go."""
    change_refused(quantized, "late", _set(operator, name, value), operator)


def _tensor(model: onnx.ModelProto, suffix: str) -> TensorProto:
    found: TensorProto = next(t for t in model.graph.initializer if t.name.endswith(suffix))
    return found


NODES: dict[str, tuple[str, Callable[[onnx.ModelProto], Any], str]] = {
    "an attribute more": (
        "late",
        lambda m: node(m, "Mul").attribute.append(helper.make_attribute("axis", 1)),
        "'axis' is 1",
    ),
    "an attribute twice": (
        "late",
        lambda m: node(m, "QuickGelu").attribute.append(helper.make_attribute("alpha", 1.0)),
        "more than once",
    ),
    "an attribute less": ("late", lambda m: node(m, "QuickGelu").attribute.pop(), "alpha"),
    "an attribute without value": (
        "late",
        lambda m: attribute(m, "QuickGelu", "alpha").ClearField("f"),
        "no value of its type",
    ),
    "an attribute of lists": (
        "late",
        lambda m: attribute(m, "QuickGelu", "alpha").CopyFrom(
            helper.make_attribute("alpha", [1.0])
        ),
        "field 7",
    ),
    "an input more": ("late", lambda m: node(m, "Mul").input.append("hidden"), "3 inputs"),
    "an output more": ("late", lambda m: node(m, "Mul").output.append("x"), "2 outputs"),
    "an input of nowhere": ("late", lambda m: node(m, "Mul").input.__setitem__(0, "x"), "'x'"),
    "an input left out": (
        "late",
        lambda m: node(m, "Mul").input.__setitem__(0, ""),
        "input 0 is left out",
    ),
    "an input of later": (
        "late",
        lambda m: node(m, "MatMulNBits").input.__setitem__(0, m.graph.node[-2].output[0]),
        "by no node before it",
    ),
    "an output of before": (
        "late",
        lambda m: node(m, "Mul").output.__setitem__(0, node(m, "MatMulNBits").output[0]),
        "is there already",
    ),
    "an output left out": (
        "late",
        lambda m: node(m, "Mul").output.__setitem__(0, ""),
        "its outputs are",
    ),
    "an output with the name of an input": (
        "late",
        lambda m: node(m, "Mul").output.__setitem__(0, "hidden"),
        "is the name of an input",
    ),
    "an output with the name of another graph's input": (
        "late",
        lambda m: node(m, "Mul").output.__setitem__(0, "token_ids"),
        "is the name of an input",
    ),
    "a tensor with the name of another graph's input": (
        "head",
        lambda m: setattr(_tensor(m, "norm"), "name", "seqlens_k"),
        "'seqlens_k' is made in it, and is the name of an input",
    ),
    "outputs of training": (
        "late",
        lambda m: node(m, "SkipSimplifiedLayerNormalization").output.__setitem__(1, "mean"),
        "outputs 1 and 2",
    ),
    "the cache of another layer": (
        "late",
        lambda m: node(m, "GroupQueryAttention").input.__setitem__(3, "keys.2"),
        "its inputs are",
    ),
    "rows by token ids": (
        "late",
        lambda m: node(m, "GatherBlockQuantized").input.__setitem__(1, "position"),
        "'position'",
    ),
    "an embedding of fewer tokens": (
        "embed",
        lambda m: _tensor(m, ".codes").dims.__setitem__(0, 299),
        "its length is",
    ),
    "a name that does not print": (
        "late",
        lambda m: node(m, "Mul").output.__setitem__(0, "a\nb"),
        "expected 1 to 256 plain characters",
    ),
    "a reshape to nothing": (
        "prefill",
        lambda m: setattr(_tensor(m, "flat"), "raw_data", struct.pack("<q", 7)),
        "cannot be [7]",
    ),
    "a maximum over another axis": (
        "prefill",
        lambda m: setattr(_tensor(m, "last"), "raw_data", struct.pack("<q", 1)),
        "expected the last of three",
    ),
    "filling with more than a byte": (
        "prefill",
        lambda m: attribute(m, "ConstantOfShape", "value").t.CopyFrom(
            helper.make_tensor("v", TensorProto.FLOAT, [1], b"\0\0\0\0", raw=True)
        ),
        "expected T bytes",
    ),
}


@pytest.mark.parametrize("case", NODES)
def test_b14_nodes(quantized: Path, case: str) -> None:
    change_refused(quantized, *NODES[case])


def test_b14_weights_of_another_shape(quantized: Path) -> None:
    """As many bytes as before, so that only the operator can tell."""

    def change(model: onnx.ModelProto) -> None:
        external(model).dims.reverse()

    change_refused(quantized, "late", change, "expected uint8")


def test_b14_long_names_do_not_make_long_messages(quantized: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        for at in range(9):
            node(model, "GroupQueryAttention").input[at] = f"{at}" * 200
        for at in range(9):
            model.graph.initializer.append(
                TensorProto(name=f"{at}" * 200, data_type=1, dims=[1], raw_data=bytes(4))
            )

    assert len(change_refused(quantized, "late", change)) < 1200


def test_the_files_are_read_in_a_moment(quantized: Path) -> None:
    """What every load costs, with room for a busy machine."""
    import time

    from stem_edge.onnx_check import check_graphs

    bundle = stem_edge.open_bundle(quantized)
    started = time.process_time()
    check_graphs(bundle)
    assert time.process_time() - started < 5
    assert (quantized / graph_file("prefill")).stat().st_size < 1 << 17
