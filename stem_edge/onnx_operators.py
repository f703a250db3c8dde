"""The operators that graphs of a backbone may have, and the shapes that they make.

onnxruntime checks little of what it is given: some kernels read as far as an attribute says, and
not as far as the weight goes. So every operator has the attributes that the exporter writes here,
with the values that they may have, and a rule for its inputs: what it gives for them, or why they do
not fit. No rule lets a value grow beyond what its weights or the model's widths account for.

A new operator of the exporter is an entry of OPERATORS and a rule in stem_edge.onnx_rules, or in
stem_edge.onnx_fused if it is one of onnxruntime's.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from stem_edge import onnx_fused as fused
from stem_edge import onnx_rules as rules
from stem_edge.graph_io import Value
from stem_edge.onnx_file import Node
from stem_edge.onnx_rules import Rule, Step

CONTRIB = "com.microsoft"
OPSETS = {"": 21, CONTRIB: 1}
BLOCKS = (16, 32, 64, 128, 256)
MAX_SIZE = 1 << 31

Allowed = tuple[Any, ...] | range | type  # values, or any of a type


class Operator(NamedTuple):
    """What a node of an operator may look like."""

    rule: Rule
    inputs: tuple[int, ...]  # how many; one that is left out has an empty name
    attributes: Mapping[str, Allowed] = MappingProxyType({})
    optional: Mapping[str, Allowed] = MappingProxyType({})
    outputs: int | range = 1


Known = Mapping[tuple[str, str], Operator]  # domain and name -> what is known
EXPERTS: dict[str, Allowed] = {
    "k": (1,),
    "normalize_routing_weights": (1,),
    "activation_type": ("swiglu",),
    "swiglu_fusion": (1,),
    "activation_alpha": (1.0,),
    "activation_beta": (0.0,),
}
GATHERED: dict[str, Allowed] = {
    "bits": (4, 8),
    "block_size": BLOCKS,
    "gather_axis": (0,),
    "quantize_axis": (1,),
}
PRODUCT: dict[str, Allowed] = {
    "K": range(1, MAX_SIZE),
    "N": range(1, MAX_SIZE),
    "bits": (4, 8),
    "block_size": BLOCKS,
    "accuracy_level": (4,),
}
ATTENTION: dict[str, Allowed] = {
    "num_heads": range(1, MAX_SIZE),
    "kv_num_heads": range(1, MAX_SIZE),
    "do_rotary": (1,),
    "rotary_interleaved": (0, 1),
    "scale": float,
}
OPERATORS: dict[tuple[str, str], Operator] = {
    ("", "Abs"): Operator(rules.unchanged, (1,)),
    ("", "Add"): Operator(rules.widened, (2,)),
    ("", "Cast"): Operator(rules.cast, (1,), {"to": (1,)}),
    ("", "Concat"): Operator(rules.concat, tuple(range(2, 1 << 12)), {"axis": (-1,)}),
    ("", "ConstantOfShape"): Operator(rules.constant_of_shape, (1,), {"value": tuple}),
    ("", "Div"): Operator(rules.widened, (2,)),
    ("", "Gather"): Operator(rules.gather, (2,)),
    ("", "Max"): Operator(rules.widened, (2,)),
    ("", "Mul"): Operator(rules.widened, (2,)),
    ("", "OneHot"): Operator(rules.one_hot, (3,), {"axis": (-1,)}),
    ("", "QuantizeLinear"): Operator(rules.quantize_linear, (3,), {"axis": (1,)}),
    ("", "ReduceMax"): Operator(rules.reduce_max, (2,), {"keepdims": (1,)}),
    ("", "Reshape"): Operator(rules.reshape, (2,)),
    ("", "Shape"): Operator(rules.shape, (1,), {}, {"start": (0,), "end": (1,)}),
    ("", "SimplifiedLayerNormalization"): Operator(
        rules.norm, (2,), {"axis": (-1,), "epsilon": float}
    ),
    ("", "Split"): Operator(rules.split, (2,), {"axis": (-1,)}, outputs=3),
    ("", "Tanh"): Operator(rules.unchanged, (1,)),
    (CONTRIB, "FusedMatMul"): Operator(fused.fused_matmul, (2,), {"transB": (1,)}),
    (CONTRIB, "GatherBlockQuantized"): Operator(fused.gather_blocks, (4,), GATHERED),
    (CONTRIB, "GroupQueryAttention"): Operator(
        fused.attention, (9,), ATTENTION, {"local_window_size": range(1, MAX_SIZE)}, outputs=3
    ),
    (CONTRIB, "MatMulIntegerToFloat"): Operator(fused.integer_product, (5,)),
    (CONTRIB, "MatMulNBits"): Operator(fused.block_product, (3, 4), PRODUCT),
    (CONTRIB, "MoE"): Operator(fused.experts, (5,), EXPERTS),
    (CONTRIB, "QMoE"): Operator(
        fused.quantized_experts,
        (7,),
        EXPERTS | {"expert_weight_bits": (4, 8), "block_size": BLOCKS},
    ),
    (CONTRIB, "QuickGelu"): Operator(rules.unchanged, (1,), {"alpha": (1.0,)}),
    (CONTRIB, "SkipSimplifiedLayerNormalization"): Operator(
        fused.skip_norm, (3,), {"epsilon": float}, outputs=4
    ),
}


def find_operator(node: Node, known: Known = OPERATORS) -> Operator:
    """What is known of a node's operator, if it may be there. Raises ValueError."""
    operator = known.get((node.domain, node.operator))
    if operator is None:
        raise ValueError(
            f"operator {node.operator!r} of domain {node.domain!r} is none that a backbone has; "
            "stem-edge never loads operators of others"
        )
    attributes, allowed = node.attributes, {**operator.attributes, **operator.optional}
    for name, value in attributes.items():
        if name not in allowed or not _fits(value, allowed[name]):
            raise ValueError(f"attribute {name!r} is {ascii(value)[:80]}, which it may not be")
    if missing := sorted(operator.attributes.keys() - attributes):
        raise ValueError(f"attributes {', '.join(missing)} are missing")
    outputs = operator.outputs
    given = outputs if isinstance(outputs, range) else (outputs,)
    if len(node.inputs) not in operator.inputs or len(node.outputs) not in given:
        raise ValueError(
            f"{len(node.inputs)} inputs and {len(node.outputs)} outputs; expected "
            f"{operator.inputs[0]} to {operator.inputs[-1]} and {given[0]} to {given[-1]}"
        )
    return operator


def _fits(value: object, allowed: Allowed) -> bool:
    if isinstance(allowed, type):
        # Several numbers are a tuple, and so is a tensor, the only one that is allowed by its type.
        return isinstance(value, allowed) and type(value) is not tuple
    return type(value) is type(allowed[0]) and value in allowed


def results(operator: Operator, step: Step) -> list[Value | None]:
    """What a node gives: None for an output that is left out. Raises ValueError."""
    return operator.rule(step)
