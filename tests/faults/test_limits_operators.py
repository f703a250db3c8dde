"""Limits of the operators of a graph: how many inputs, and which attributes with which values."""

from __future__ import annotations

from typing import Any

import pytest
from graph_steps import MODEL, f32

from stem_edge import onnx_device
from stem_edge.onnx_file import Node
from stem_edge.onnx_operators import CONTRIB, OPERATORS, OPSETS, Known, find_operator, results
from stem_edge.onnx_rules import Step

EXPERTS = {
    "k": (1,),
    "normalize_routing_weights": (1,),
    "activation_type": ("swiglu",),
    "swiglu_fusion": (1,),
    "activation_alpha": (1.0,),
    "activation_beta": (0.0,),
}
SIZES, BLOCKS = range(1, 2**31), (16, 32, 64, 128, 256)
NORMS: dict[str, Any] = {"epsilon": float}
# inputs, outputs, attributes that must be there, attributes that may
KNOWN: dict[tuple[str, str], tuple[Any, int, dict[str, Any], dict[str, Any]]] = {
    **{("", name): ((1,), 1, {}, {}) for name in ("Abs", "Tanh")},
    **{("", name): ((2,), 1, {}, {}) for name in ("Add", "Div", "Max", "Mul", "Gather", "Reshape")},
    ("", "Cast"): ((1,), 1, {"to": (1,)}, {}),
    ("", "Concat"): (tuple(range(2, 4096)), 1, {"axis": (-1,)}, {}),
    ("", "ConstantOfShape"): ((1,), 1, {"value": tuple}, {}),
    ("", "OneHot"): ((3,), 1, {"axis": (-1,)}, {}),
    ("", "QuantizeLinear"): ((3,), 1, {"axis": (1,)}, {}),
    ("", "ReduceMax"): ((2,), 1, {"keepdims": (1,)}, {}),
    ("", "Shape"): ((1,), 1, {}, {"start": (0,), "end": (1,)}),
    ("", "SimplifiedLayerNormalization"): ((2,), 1, {"axis": (-1,), **NORMS}, {}),
    ("", "Split"): ((2,), 3, {"axis": (-1,)}, {}),
    (CONTRIB, "FusedMatMul"): ((2,), 1, {"transB": (1,)}, {}),
    (CONTRIB, "GatherBlockQuantized"): (
        (4,),
        1,
        {"bits": (4, 8), "block_size": BLOCKS, "gather_axis": (0,), "quantize_axis": (1,)},
        {},
    ),
    (CONTRIB, "GroupQueryAttention"): (
        (9,),
        3,
        {
            "num_heads": SIZES,
            "kv_num_heads": SIZES,
            "do_rotary": (1,),
            "rotary_interleaved": (0, 1),
            "scale": float,
        },
        {"local_window_size": SIZES},
    ),
    (CONTRIB, "MatMulIntegerToFloat"): ((5,), 1, {}, {}),
    (CONTRIB, "MatMulNBits"): (
        (3, 4),
        1,
        {"K": SIZES, "N": SIZES, "bits": (4, 8), "block_size": BLOCKS, "accuracy_level": (4,)},
        {},
    ),
    (CONTRIB, "MoE"): ((5,), 1, EXPERTS, {}),
    (CONTRIB, "QMoE"): ((7,), 1, EXPERTS | {"expert_weight_bits": (4, 8), "block_size": BLOCKS}, {}),
    (CONTRIB, "QuickGelu"): ((1,), 1, {"alpha": (1.0,)}, {}),
    (CONTRIB, "SkipSimplifiedLayerNormalization"): ((3,), 4, NORMS, {}),
}  # fmt: skip


def test_every_operator_is_what_it_was() -> None:
    assert table(OPERATORS) == KNOWN
    assert OPSETS == {"": 21, "com.microsoft": 1}


DEVICES: dict[tuple[str, str], tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    **{("", name): KNOWN["", name] for name in ("Add", "Div", "Mul", "Reshape", "Split", "Tanh")},
    ("", "SimplifiedLayerNormalization"): KNOWN["", "SimplifiedLayerNormalization"],
    **{
        (CONTRIB, name): KNOWN[CONTRIB, name]
        for name in ("GatherBlockQuantized", "GroupQueryAttention", "QuickGelu")
    },
    (CONTRIB, "SkipSimplifiedLayerNormalization"): ((3,), 4, NORMS, {}),
    ("", "Cast"): ((1,), 1, {"to": (1, 10)}, {}),
    ("", "Concat"): (tuple(range(2, 4096)), 1, {"axis": (-1, 2)}, {}),
    ("", "ConstantOfShape"): ((1,), 1, {"value": tuple}, {}),
    ("", "Gather"): ((2,), 1, {}, {"axis": (1,)}),
    ("", "MatMul"): ((2,), 1, {}, {}),
    ("", "Transpose"): ((1,), 1, {}, {}),
    ("", "Unsqueeze"): ((2,), 1, {}, {}),
    (CONTRIB, "MatMulNBits"): (
        (3, 4),
        1,
        {"K": SIZES, "N": SIZES, "bits": (4, 8), "block_size": BLOCKS},
        {},
    ),
}  # fmt: skip
SERVING = {
    "rows": {
        ("", "Split"): ((2,), range(1, 4096), {"axis": (1,)}, {}),
        ("", "ScatterND"): ((3,), 1, {}, {}),
    },
    "top": {("", "TopK"): ((2,), 2, {}, {})},
}


def table(
    operators: Known,
) -> dict[tuple[str, str], tuple[Any, Any, dict[str, Any], dict[str, Any]]]:
    return {
        key: (tuple(o.inputs), o.outputs, dict(o.attributes), dict(o.optional))
        for key, o in operators.items()
    }


def test_every_operator_for_devices_is_what_it_was() -> None:
    assert table(onnx_device.OPERATORS) == DEVICES
    assert {graph: table(known) for graph, known in onnx_device.SERVING.items()} == SERVING


def test_several_outputs_and_attributes() -> None:
    known = onnx_device.SERVING["rows"]
    for count, valid in ((0, False), (1, True), (4095, True), (4096, False)):
        node = Node("Split", "", ["x", "s"], ["y"] * count, {"axis": 1})
        if valid:
            assert find_operator(node, known).outputs == range(1, 4096)
        else:
            with pytest.raises(ValueError, match=f"{count} outputs; expected 2 to 2 and 1 to 4095"):
                find_operator(node, known)
    filling = Node("ConstantOfShape", "", ["x"], ["y"], {"value": (1, 2)})
    with pytest.raises(ValueError, match="attribute 'value' is"):
        find_operator(filling)


def node_of(inputs: int = 3, outputs: int = 1, **attributes: Any) -> Node:
    """A product of a matrix of codes, whose attributes fit."""
    allowed = {"K": 32, "N": 8, "bits": 4, "block_size": 32, "accuracy_level": 4}
    every = {name: value for name, value in (allowed | attributes).items() if value is not None}
    return Node("MatMulNBits", CONTRIB, ["x"] * inputs, ["y"] * outputs, every)


@pytest.mark.parametrize(
    ("change", "valid"),
    [
        ({}, True),
        ({"inputs": 4}, True),
        ({"inputs": 5}, False),
        ({"inputs": 2}, False),
        ({"outputs": 0}, False),
        ({"outputs": 2}, False),
        ({"K": 1}, True),
        ({"K": 0}, False),
        ({"K": (1 << 31) - 1}, True),
        ({"K": 1 << 31}, False),
        ({"K": None}, False),
        ({"K": 32.0}, False),
        ({"bits": 8}, True),
        ({"bits": 5}, False),
        ({"bits": True}, False),
        ({"block_size": 256}, True),
        ({"block_size": 512}, False),
        ({"other": 1}, False),
        ({"axis": -1}, False),
    ],
)
def test_what_a_node_may_have(change: dict[str, Any], valid: bool) -> None:
    if valid:
        assert find_operator(node_of(**change)) is OPERATORS[CONTRIB, "MatMulNBits"]
    else:
        with pytest.raises(ValueError, match=r"attribute|inputs"):
            find_operator(node_of(**change))


def test_attributes_of_a_type_may_have_any_value_of_it() -> None:
    norm = Node("SimplifiedLayerNormalization", "", ["x", "w"], ["y"], {"axis": -1, "epsilon": 2.0})
    assert find_operator(norm).inputs == (2,)
    norm.attributes["epsilon"] = 1
    with pytest.raises(ValueError, match="'epsilon' is 1"):
        find_operator(norm)
    for domain, name in (("", "MatMulNBits"), (CONTRIB, "Abs")):
        with pytest.raises(ValueError, match="none that a backbone has"):
            find_operator(Node(name, domain, ["x"], ["y"], {}))
    step = Step(Node("Abs", "", ["x"], ["y"], {}), [f32(2)], MODEL, None)
    assert results(OPERATORS["", "Abs"], step) == [f32(2)]
