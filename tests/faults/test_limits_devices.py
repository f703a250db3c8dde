"""Limits of the graphs for devices: what each takes and gives, its operators, and how many of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
from graph_steps import LAYOUT as EXPERTS
from graph_steps import MODEL, f16, f32, i32, i64, u8

from stem_edge import onnx_device, onnx_operators, onnx_portable
from stem_edge.bundle import Manifest
from stem_edge.config import ModelConfig
from stem_edge.device_io import FLOATS, device_inputs, device_outputs
from stem_edge.device_rows import Activations
from stem_edge.graph_io import Value, Variant
from stem_edge.onnx_expected import expected
from stem_edge.rows import RecordLayout

LAYOUT = RecordLayout(records=3, layers=(1,), parts=((96,),), row_type="int4", group_size=32)
LARGE = msgspec.structs.replace(MODEL, vocab_size=1 << 18, dim=128)  # two pieces


def manifest(model: ModelConfig = MODEL, tables: RecordLayout | None = LAYOUT) -> Manifest:
    return cast(Manifest, SimpleNamespace(model=model, tables=tables))


def floats(variant: Activations, *shape: int | str) -> Value:
    return {"fp32": f32, "fp16": f16}[variant](*shape)


@pytest.mark.parametrize("variant", FLOATS)
def test_inputs_and_outputs_of_graphs_that_decode(variant: Activations) -> None:
    """MODEL's layer 1 is its STEM layer; heads are padded to 16; each scale stands twice."""
    hidden, cache = floats(variant, 1, "T", 32), floats(variant, 1, 2, "capacity", 16)
    assert device_inputs("embed", MODEL, LAYOUT, variant) == {"token_ids": i64(1, "T")}
    assert device_outputs("embed", MODEL, LAYOUT, variant) == {"new_hidden": hidden}
    head = {"hidden": hidden, "wanted": i64("n")}
    assert device_inputs("head", MODEL, LAYOUT, variant) == head
    assert device_outputs("head", MODEL, LAYOUT, variant) == {"logits": f32(1, "n", 300)}
    every = {name: floats(variant, "context", 8) for name in ("rope_cos", "rope_sin")}
    every |= {"hidden": hidden, "seqlens_k": i32(1), "total_length": i32()}
    late = every | {f"{name}.{layer}": cache for name in ("keys", "values") for layer in (1, 2)}
    rows = {
        "slot_ids": i64(1, "T"),
        "row_codes.1": u8("slots", 48),
        "row_scales.1": floats(variant, "slots", 6),
        "row_zero_points": u8("slots", 3),
    }
    assert device_inputs("early", MODEL, LAYOUT, variant) == every | {
        "keys.0": cache,
        "values.0": cache,
    }
    assert device_inputs("late", MODEL, LAYOUT, variant) == late | rows
    assert device_inputs("late", MODEL, None, variant) == late
    made = {f"new_{name}.{layer}": cache for name in ("keys", "values") for layer in (1, 2)}
    assert device_outputs("late", MODEL, LAYOUT, variant) == {"new_hidden": hidden} | made


def test_rows_of_floats_have_no_scales() -> None:
    layout = RecordLayout(records=3, layers=(1,), parts=((64,),), row_type="fp16")
    found = device_inputs("late", MODEL, layout, "fp32")
    assert found["row_codes.1"] == f16("slots", 64)
    assert not found.keys() & {"row_scales.1", "row_zero_points"}


@pytest.mark.parametrize(("variant", "words"), [("fp32", 6), ("fp16", 3)])
def test_graphs_that_serve_memory(variant: Activations, words: int) -> None:
    slabs = {"row_codes.1": i32("slots", 12), "row_scales.1": i32("slots", words)}
    given = {"records": i32("n", 12 + words), "slots": i64("n", 1)} | slabs
    assert device_inputs("rows", MODEL, LAYOUT, variant) == given
    made = {f"new_{name}": value for name, value in slabs.items()}
    assert device_outputs("rows", MODEL, LAYOUT, variant) == made
    assert device_inputs("rows", MODEL, None, variant) == {}
    assert device_outputs("rows", MODEL, None, variant) == {}
    top = {"logits": f32(1, "n", 300), "count": i64(1)}
    assert device_inputs("top", MODEL, LAYOUT, variant) == top
    largest = {"top_logits": f32(1, "n", "count"), "top_ids": i64(1, "n", "count")}
    assert device_outputs("top", MODEL, LAYOUT, variant) == largest


def test_what_is_expected_of_graphs_that_decode() -> None:
    late = expected("late", "fp16", manifest())
    assert late.inputs == device_inputs("late", MODEL, LAYOUT, "fp16")
    assert late.outputs == device_outputs("late", MODEL, LAYOUT, "fp16")
    rows = {"row_codes.1", "row_scales.1", "row_zero_points"}
    for name, value in late.inputs.items():
        shape = None if name in rows else value.shape
        assert late.declared[name] == value._replace(shape=shape)
    assert late.operators is onnx_device.OPERATORS
    assert (late.opsets, late.floats) == (onnx_operators.OPSETS, "float16")
    others = {"token_ids", "keys.0", "wanted", "records", "slots"}
    assert late.reserved == late.inputs.keys() | others | {"values.0"}
    assert expected("late", "fp32", manifest()).floats == "float32"


def test_what_is_expected_of_graphs_that_serve_memory() -> None:
    rows, top = (expected(graph, "fp32", manifest()) for graph in ("rows", "top"))
    assert rows.declared == rows.inputs == device_inputs("rows", MODEL, LAYOUT, "fp32")
    assert top.declared == top.inputs == device_inputs("top", MODEL, LAYOUT, "fp32")
    assert top.reserved == {"logits", "count"}
    assert "logits" not in rows.reserved and "hidden" in rows.reserved
    assert rows.operators is onnx_device.SERVING["rows"]
    assert top.operators is onnx_device.SERVING["top"]


def test_what_is_expected_of_other_graphs() -> None:
    """Plain ones may take rows of experts, too."""
    late = expected("late", None, manifest(tables=EXPERTS))
    assert late.declared["row_codes.1.1"] == Value("uint8", None)
    assert late.inputs["row_codes.1.1"].shape == ("slots", 4, 32)
    assert late.operators is onnx_operators.OPERATORS
    assert (late.opsets, late.floats) == (onnx_operators.OPSETS, "float32")
    assert {"token_ids", "keys.0", "hidden"} <= late.reserved
    assert "wanted" not in late.reserved
    head = expected("head", "portable", manifest())
    assert (head.operators, head.opsets) == (onnx_portable.OPERATORS, {"": 21})
    assert head.declared == head.inputs and head.floats == "float32"
    assert {"token_ids", "mask.0", "row.1"} <= head.reserved
    assert head.outputs == {"logits": f32(1, "n", 300)}


@pytest.mark.parametrize(
    ("variant", "most"),
    [
        (None, {"embed": 16, "early": 112, "late": 208, "prefill": 304, "head": 16}),
        ("fp16", {"embed": 16, "early": 112, "late": 208, "rows": 304, "top": 16, "head": 16}),
        ("portable", {"embed": 48, "early": 208, "late": 368, "head": 48}),
    ],
)
def test_how_many_operators(variant: Variant | None, most: dict[str, int]) -> None:
    assert {graph: expected(graph, variant, manifest()).nodes for graph in most} == most
    head = expected("head", variant, manifest(LARGE)).nodes
    assert head == most["head"] + (16 if variant == "portable" else 4)
    embed = expected("embed", variant, manifest(LARGE)).nodes
    assert embed == most["embed"]


def test_operators_are_those_that_devices_need() -> None:
    """Those of one kind of graph are refused in the other."""
    decode = onnx_device.OPERATORS
    assert not {("", "ScatterND"), ("", "TopK")} & decode.keys()
    assert set(onnx_device.SERVING) == {"rows", "top"}
    assert set(onnx_device.SERVING["rows"]) == {("", "Split"), ("", "ScatterND")}
    assert set(onnx_device.SERVING["top"]) == {("", "TopK")}
    assert decode["", "Cast"].attributes == {"to": (1, 10)}
    assert "accuracy_level" not in decode["com.microsoft", "MatMulNBits"].attributes
