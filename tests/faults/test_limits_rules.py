"""Limits of what operators of a graph take, and what they make of it: each rule by itself.

Whole graphs that break them: test_b_onnx.py, test_b_protobuf.py. Attention and experts:
test_limits_fused.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from graph_steps import Made, f16, f32, fails, i32, i64, others, run, sizes, u8

from stem_edge import onnx_fused as fused
from stem_edge import onnx_rules as rules
from stem_edge.graph_io import Value
from stem_edge.onnx_file import Tensor
from stem_edge.onnx_rules import Rule

# Rules: each with inputs that fit and, one thing changed at a time, with some that do not

FILLING = Tensor("v", "uint8", (1,), None, None)
NORM = {"epsilon": 1e-5}
HALF = {"floats": "float16"}
SAME: dict[str, Any] = {"names": {0: "x", 1: "x"}, "axis": 2}
GATHER = {1: "token_ids"}
GATHERED = {"bits": 4, "block_size": 32}
PRODUCT = {"N": 6, "K": 96, "bits": 4, "block_size": 32}
Case = tuple[Rule, tuple[Value | None, ...], dict[str, Any], Made]
FITTING: dict[str, Case] = {
    "unchanged": (rules.unchanged, (f32(1, "T"),), {}, [f32(1, "T")]),
    "widened": (rules.widened, (f32(1, "T", 32), f32(32)), {}, [f32(1, "T", 32)]),
    "widened, turned": (rules.widened, (f32(1), f32("T", 8)), {}, [f32("T", 8)]),
    "widened, lines": (rules.widened, (f32(1, "T", 1), f32(1, "T", 8)), {}, [f32(1, "T", 8)]),
    "widened, greater first": (
        rules.widened,
        (f32(1, "T", 8), f32(1, "T", 1)),
        {},
        [f32(1, "T", 8)],
    ),
    "widened, names": (rules.widened, (f32("T", 1), f32(1, 1)), {}, [f32("T", 1)]),
    "cast": (rules.cast, (f16(1, "T"),), {"to": 1}, [f32(1, "T")]),
    "cast to half": (rules.cast, (f32(1, "T"),), {"to": 10}, [f16(1, "T")]),
    "wanted": (
        rules.gather,
        (f16(1, "T", 32), i64("n")),
        {"names": {0: "hidden", 1: "wanted"}, "axis": 1} | HALF,
        [f16(1, "n", 32)],
    ),
    "twice": (
        rules.concat,
        (f16(300, 3, 1), f16(300, 3, 1)),
        {"names": {0: "x", 1: "x"}, "axis": 2, "floats": "float16"},
        [f16(300, 3, 2)],
    ),
    "one more dimension": (rules.unsqueeze, (f32(300, 3), sizes(2)), {}, [f32(300, 3, 1)]),
    "turned": (rules.transpose, (f32(5, 32),), {}, [f32(32, 5)]),
    "product": (rules.product, (f32(1, "T", 32), f32(32, 5)), {}, [f32(1, "T", 5)]),
    "zero points": (
        rules.constant_points,
        (sizes(300, 3),),
        {"value": FILLING},
        [u8(300, 3)],
    ),
    "words": (
        rules.split_words,
        (i32("n", 7), sizes(4, 3)),
        {"outputs": ("y", "z")},
        [i32("n", 4), i32("n", 3)],
    ),
    "into slots": (
        rules.scatter,
        (i32("slots", 4), i64("n", 1), i32("n", 4)),
        {"names": {1: "slots"}},
        [i32("slots", 4)],
    ),
    "the greatest": (
        rules.top,
        (f32(1, "n", 300), i64(1)),
        {"names": {0: "logits", 1: "count"}, "floats": "float16"},
        [f32(1, "n", "count"), i64(1, "n", "count")],
    ),
    "in half": (rules.norm, (f16(1, "T", 8), f16(8)), NORM | HALF, [f16(1, "T", 8)]),
    "blocks in half": (
        fused.block_product,
        (f16(1, "T", 96), u8(6, 3, 16), f16(18)),
        PRODUCT | HALF,
        [f16(1, "T", 6)],
    ),
    "concat": (rules.concat, (f32(1, "T", 100), f32(1, "T", 200)), {}, [f32(1, "T", 300)]),
    "filling": (rules.constant_of_shape, (sizes("T"),), {"value": FILLING}, [u8("T")]),
    "gather": (rules.gather, (f32(300, 32), i64(1, "T")), {"names": GATHER}, [f32(1, "T", 32)]),
    "gather rows": (
        rules.gather,
        (Value("float16", ("slots", 64)), i64(1, "T")),
        {"names": {1: "slot_ids"}},
        [Value("float16", (1, "T", 64))],
    ),
    "one-hot": (rules.one_hot, (i64("T"), sizes("slots"), f32(2)), {}, [f32("T", "slots")]),
    "quantize": (rules.quantize_linear, (f32(1, "T", 8), f32("T"), u8("T")), {}, [u8(1, "T", 8)]),
    "maximum": (rules.reduce_max, (f32(1, "T", 8), sizes(2)), {}, [f32(1, "T", 1)]),
    "one line": (rules.reshape, (i64(1, "T"), sizes(-1)), {}, [i64("T")]),
    "one line of numbers": (rules.reshape, (f32(2, 3), sizes(-1)), {}, [f32(6)]),
    "one line of one": (rules.reshape, (f32(1, 1), sizes(-1)), {}, [f32(1)]),
    "split heads": (rules.reshape, (f32(1, "T", 32), sizes(0, 0, 4, 8)), {}, [f32(1, "T", 4, 8)]),
    "join heads": (rules.reshape, (f32(1, "T", 4, 8), sizes(0, "T", 32)), {}, [f32(1, "T", 32)]),
    "sizes": (rules.shape, (f32(1, "T"),), {}, [Value("int64", (2,), (1, "T"))]),
    "first size": (
        rules.shape,
        (f32("slots", 8),),
        {"start": 0, "end": 1},
        [Value("int64", (1,), ("slots",))],
    ),
    "norm": (rules.norm, (f32(1, "T", 32), f32(32)), NORM, [f32(1, "T", 32)]),
    "split": (
        rules.split,
        (f32(1, "T", 7), sizes(4, 2, 1)),
        {},
        [f32(1, "T", 4), f32(1, "T", 2), f32(1, "T", 1)],
    ),
    "gather blocks": (
        fused.gather_blocks,
        (u8(300, 48), i64(1, "T"), f32(300, 3), u8(300, 2)),
        {"names": GATHER, **GATHERED},
        [f32(1, "T", 96)],
    ),
    "gather blocks of bytes": (
        fused.gather_blocks,
        (u8("slots", 96), i64(1, "T"), f32("slots", 3), u8("slots", 3)),
        {"names": {1: "slot_ids"}, "bits": 8, "block_size": 32},
        [f32(1, "T", 96)],
    ),
    "skip norm": (
        fused.skip_norm,
        (f32(1, "T", 32), f32(1, "T", 32), f32(32)),
        {"outputs": ("y", "", "", "z"), **NORM},
        [f32(1, "T", 32), None, None, f32(1, "T", 32)],
    ),
    "matrix": (fused.fused_matmul, (f32(1, "T", 32), f32(5, 32)), {}, [f32(1, "T", 5)]),
    "blocks": (
        fused.block_product,
        (f32(1, "T", 96), u8(6, 3, 16), f32(18)),
        PRODUCT,
        [f32(1, "T", 6)],
    ),
    "blocks with zero points": (
        fused.block_product,
        (f32(1, "T", 96), u8(6, 3, 16), f32(18), u8(12)),
        PRODUCT,
        [f32(1, "T", 6)],
    ),
    "blocks of bytes": (
        fused.block_product,
        (f32(1, "T", 96), u8(6, 3, 32), f32(18), u8(18)),
        PRODUCT | {"bits": 8},
        [f32(1, "T", 6)],
    ),
    "integers": (
        fused.integer_product,
        (u8(1, "T", 8), Value("int8", (8, 5)), f32(), f32(5), u8()),
        {},
        [f32(1, "T", 5)],
    ),
}


@pytest.mark.parametrize("case", FITTING)
def test_what_fits(case: str) -> None:
    rule, inputs, options, expected = FITTING[case]
    assert run(rule, *inputs, **options) == expected


# These take inputs of many shapes; REFUSED below has what they do not.
FLEXIBLE = (rules.widened, rules.reshape, rules.shape, rules.reduce_max)


@pytest.mark.parametrize("case", [c for c, (rule, *_) in FITTING.items() if rule not in FLEXIBLE])
def test_any_other_input_is_refused_or_makes_something_else(case: str) -> None:
    rule, inputs, options, expected = FITTING[case]
    for at, value in enumerate(inputs):
        for other in others(value):
            try:
                made = run(rule, *inputs[:at], other, *inputs[at + 1 :], **options)
            except ValueError:
                continue
            assert made != expected, (at, other)


REFUSED: list[Case] = [
    (rules.gather, (f32(1, "T", 32), i64("n")), {"axis": 1, "names": {1: "wanted"}}, []),
    (rules.gather, (f32(1, "T", 32), i64("n")), {"axis": 1, "names": {0: "hidden"}}, []),
    (rules.concat, (f32(300, 3, 1), f32(300, 3, 1)), {"axis": 2}, []),
    (rules.concat, (f32(300, 3, 2), f32(300, 3, 2)), SAME, []),
    (rules.concat, (f32(300, 3), f32(300, 3)), SAME, []),
    (rules.concat, (f32(3, 3, 1),) * 3, SAME | {"names": {0: "x", 1: "x", 2: "x"}}, []),
    (rules.unsqueeze, (f32(300, 3), sizes(1)), {}, []),
    (rules.unsqueeze, (f32(300, 3, 1), sizes(2)), {}, []),
    (rules.transpose, (f32(300, 3, 1),), {}, []),
    (rules.transpose, (f32("T", 3),), {}, []),
    (rules.product, (f32("T", 32), f32(32, 5)), {}, []),
    (rules.product, (f32(1, "T", 32), f32(32, 5, 1)), {}, []),
    (rules.product, (f32(1, "T", 32), f32(5, 32)), {}, []),
    (rules.product, (f32(1, "T", 32), f32(32, "T")), {}, []),
    *(
        (rules.constant_points, (size,), {"value": FILLING}, [])
        for size in (sizes(300), sizes(301, 3), sizes(300, 0), sizes(300, 32), sizes(300, "T"))
    ),
    (rules.constant_points, (sizes(300, 3),), {"value": FILLING._replace(dims=(2,))}, []),
    (rules.constant_points, (sizes(300, 3),), {"value": FILLING._replace(type="int8")}, []),
    *(
        (rules.split_words, (i32("n", 7), size), {"outputs": ("y", "z")}, [])
        for size in (
            sizes(7),
            sizes(4, 4),
            sizes(9, -2),
            sizes(7, 0),
            sizes(7, "T"),
            sizes(4, 2, 1),
        )
    ),
    (rules.scatter, (i32("slots", 4), i64("n", 1), i32("n", 4)), {}, []),
    (rules.scatter, (i32("n", 4), i64("n", 1), i32("n", 4)), {"names": {1: "slots"}}, []),
    (rules.scatter, (i32("slots", 4, 1), i64("n", 1), i32("n", 4)), {"names": {1: "slots"}}, []),
    (rules.scatter, (i32("slots", 4), i64("n", 1), i32("n", 5)), {"names": {1: "slots"}}, []),
    (rules.top, (f32(1, "n", 300), i64(1)), {"names": {0: "logits"}}, []),
    (rules.top, (f32(1, "n", 300), i64(1)), {"names": {1: "count"}}, []),
    (rules.top, (f16(1, "n", 300), i64(1)), {"names": {0: "logits", 1: "count"}}, []),
    (rules.norm, (f32(1, "T", 8), f32(8)), NORM | HALF, []),
    (rules.norm, (f16(1, "T", 8), f32(8)), NORM | HALF, []),
    (rules.quantize_linear, (f32("T", 8), f32(8), u8(8)), {}, []),
    (rules.widened, (f32("T", 8), f32(8, "T")), {}, []),
    (rules.widened, (f32("T", 8), f32(2, "T", 8, 3)), {}, []),
    (rules.widened, (f32(3, 1, 1), f32("T", 8)), {}, []),
    (rules.widened, (f32(1, 8), f32("T", 4)), {}, []),
    (rules.widened, (f32(2, 8), f32("T", 8)), {}, []),
    (rules.concat, (f32(1, "T", 101), f32(1, "T", 200)), {}, []),
    (rules.concat, (f32(1, "T", 1), f32(2, "T", 1)), {}, []),
    (rules.concat, (f32("T"), f32("T")), {}, []),
    (rules.concat, (f32(), f32()), {}, []),
    (rules.constant_of_shape, (sizes("T", "T"),), {"value": FILLING}, []),
    (rules.constant_of_shape, (sizes("T"),), {"value": FILLING._replace(dims=(2,))}, []),
    (rules.constant_of_shape, (sizes("T"),), {"value": FILLING._replace(type="int8")}, []),
    (rules.constant_of_shape, (i64(1),), {"value": FILLING}, []),
    (rules.gather, (f32(300, 32), i64(1, "T")), {}, []),
    (rules.gather, (f32(300, 32), i64(1, "T")), {"names": {1: "slot_ids"}}, []),
    (rules.gather, (f32(300), i64(1, "T")), {"names": GATHER}, []),
    (rules.gather, (f32("slots", 32), i64(1, "T")), {}, []),
    (rules.one_hot, (i64("T"), sizes("T"), f32(2)), {}, []),
    (rules.reduce_max, (f32(1, "T", 8), sizes(1)), {}, []),
    (rules.reduce_max, (f32("T", 8), sizes(2)), {}, []),
    (rules.reduce_max, (u8(1, "T", 8), sizes(2)), {}, []),
    (rules.reshape, (f32("T", "slots"), sizes(-1)), {}, []),
    (rules.reshape, (f32(2, "T"), sizes(-1)), {}, []),
    (rules.reshape, (f32(1, 6), sizes(-1, 6)), {}, []),
    (rules.reshape, (f32(1, 6), sizes(-2, -3)), {}, []),
    (rules.reshape, (f32(1, 6), sizes(0, 7)), {}, []),
    (rules.reshape, (f32(1, "T"), sizes(0, "slots")), {}, []),
    (rules.reshape, (f32(6), sizes(6, 0)), {}, []),
    (rules.shape, (f32(1, "T"),), {"start": 0}, []),
    (rules.shape, (f32(1, "T"),), {"end": 1}, []),
    (rules.shape, (None,), {}, []),
    (rules.shape, (Value("float32", None),), {}, []),
    (rules.norm, (f32(1, "T", 32), f32(32)), {"epsilon": 0.0}, []),
    (rules.norm, (f32(1, "T", 32), f32(32)), {"epsilon": 1.0}, []),
    (rules.norm, (f32(1, "T", 32), f32(32)), {"epsilon": float("nan")}, []),
    (rules.split, (f32(1, "T", 7), sizes(4, 3)), {}, []),
    (rules.split, (f32(1, "T", 7), sizes(4, 3, 0)), {}, []),
    (rules.split, (f32(1, "T", 7), sizes(9, -1, -1)), {}, []),
    (rules.split, (f32(1, "T", 7), sizes(4, 2, 1, 0)), {}, []),
    (rules.split, (f32(1, "T", 7), sizes(4, 2, 1, "T")), {}, []),
    (rules.split, (f32(1, "T", 7), sizes(4, 2, 2)), {}, []),
    (fused.fused_matmul, (f32(1, "T", 32), f32("slots", 32)), {}, []),
    (fused.fused_matmul, (f32("T", 32), f32(5, 32)), {}, []),
    (fused.fused_matmul, (f32(1, "T", 32), f32()), {}, []),
    (
        fused.gather_blocks,
        (u8(300, 40), i64(1, "T"), f32(300, 2), u8(300, 1)),
        {"names": GATHER, **GATHERED},
        [],
    ),
    (
        fused.gather_blocks,
        (u8(1, 300, 48), i64(1, "T"), f32(1, 300, 3), u8(1, 300, 2)),
        {"names": GATHER, **GATHERED},
        [],
    ),
    *(
        (fused.skip_norm, FITTING["skip norm"][1], {"outputs": outputs, **NORM}, [])
        for outputs in (("y", "m", "", "z"), ("y", "", "m", "z"))
    ),
    (fused.skip_norm, FITTING["skip norm"][1], FITTING["skip norm"][2] | {"epsilon": 1.0}, []),
    *(
        (fused.block_product, FITTING["blocks"][1], PRODUCT | change, [])
        for change in ({"N": 7}, {"K": 97}, {"bits": 8}, {"block_size": 64}, {"K": 64})
    ),
    (
        fused.block_product,
        (f32(1, "T", 40), u8(6, 1, 16), f32(6)),
        {"N": 6, "K": 40, "bits": 4, "block_size": 32},
        [],
    ),
    (
        fused.integer_product,
        (u8("T", 8), Value("int8", (8, 5)), f32(), f32(5), u8()),
        {},
        [],
    ),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_does_not_fit(number: int) -> None:
    rule, inputs, options, _ = REFUSED[number]
    fails(rule, *inputs, **options)
