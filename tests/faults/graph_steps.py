"""Single operators of a graph, with inputs of known types and shapes: for the tests of their rules."""

from __future__ import annotations

from typing import Any

import pytest

from stem_edge.config import ModelConfig
from stem_edge.graph_io import Value
from stem_edge.onnx_file import Node
from stem_edge.onnx_rules import Rule, Step
from stem_edge.rows import RecordLayout

MODEL = ModelConfig(
    vocab_size=300,
    dim=32,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=64,
    stem_layers=(1,),
    norm_eps=1e-5,
    rope_theta=1e4,
    max_context=64,
    rope_interleaved=False,
    sliding_window=7,
    window_layers=(1,),
)
LAYOUT = RecordLayout(
    records=3, layers=(1,), parts=((4, 32), (4, 32)), row_type="int8", group_size=32
)
CACHE = Value("float32", (1, 2, "capacity", 16))
Made = list[Value | None]


def f32(*shape: int | str) -> Value:
    return Value("float32", shape)


def f16(*shape: int | str) -> Value:
    return Value("float16", shape)


def i32(*shape: int | str) -> Value:
    return Value("int32", shape)


def u8(*shape: int | str) -> Value:
    return Value("uint8", shape)


def i64(*shape: int | str) -> Value:
    return Value("int64", shape)


def sizes(*content: int | str) -> Value:
    return Value("int64", (len(content),), content)


def run(
    rule: Rule,
    *inputs: Value | None,
    names: dict[int, str] | None = None,
    outputs: tuple[str, ...] = ("y",),
    layout: RecordLayout | None = LAYOUT,
    model: ModelConfig = MODEL,
    floats: str = "float32",
    **attributes: Any,
) -> Made:
    """What a rule makes of these; names: of those inputs where they matter."""
    called = [(names or {}).get(at, f"x{at}" if value else "") for at, value in enumerate(inputs)]
    node = Node("Op", "", called, list(outputs), attributes)
    return rule(Step(node, list(inputs), model, layout, floats))


def fails(rule: Rule, *inputs: Value | None, **options: Any) -> None:
    with pytest.raises(ValueError):
        run(rule, *inputs, **options)


def others(value: Value | None) -> list[Value | None]:
    """Inputs that differ from one in one thing."""
    if value is None:
        return [f32(1)]
    found: list[Value | None] = [
        None,
        value._replace(type="int32" if value.type != "int32" else "int8"),
    ]
    shape = value.shape or ()
    for at, size in enumerate(shape):
        changed: list[int | str] = [1, "capacity"]
        if isinstance(size, int):
            changed = [size + 1, size + 2, "capacity"]
        found += [value._replace(shape=(*shape[:at], one, *shape[at + 1 :])) for one in changed]
    return [*found, value._replace(shape=(*shape, 1)), value._replace(shape=(1, *shape))]
