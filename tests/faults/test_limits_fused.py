"""Limits of attention and experts, whose kernels trust their inputs: only the runtime fills these."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from graph_steps import CACHE, MODEL, Made, f32, fails, others, run

from stem_edge import onnx_fused as fused
from stem_edge.graph_io import Value
from stem_edge.onnx_rules import Rule

PLACES = {
    3: "keys.1",
    4: "values.1",
    5: "seqlens_k",
    6: "total_length",
    7: "rope_cos",
    8: "rope_sin",
}
GIVEN = ("y", "new_keys.1", "new_values.1")
HEADS: dict[str, Any] = {
    "num_heads": 4,
    "kv_num_heads": 2,
    "do_rotary": 1,
    "rotary_interleaved": 0,
    "scale": float(np.float32(8**-0.5)),
    "local_window_size": 7,
}
REST = (
    CACHE,
    CACHE,
    Value("int32", (1,)),
    Value("int32", ()),
    f32("context", 8),
    f32("context", 8),
)
JOINED: tuple[Value | None, ...] = (f32(1, "T", 128), None, None, *REST)
APART: tuple[Value | None, ...] = (f32(1, "T", 64), f32(1, "T", 32), f32(1, "T", 32), *REST)


def attend(*inputs: Value | None, **options: Any) -> Made:
    return run(fused.attention, *inputs, **({"names": PLACES, "outputs": GIVEN} | HEADS | options))


def test_attention() -> None:
    expected = [f32(1, "T", 64), CACHE, CACHE]
    assert attend(*JOINED) == attend(*APART) == expected
    other = {at: name.replace(".1", ".2") for at, name in PLACES.items()}
    outputs = ("y", "new_keys.2", "new_values.2")
    names: dict[str, Any] = {"names": other, "outputs": outputs}
    plain = msgspec.structs.replace(MODEL, sliding_window=0, rope_interleaved=True)
    heads = HEADS | {"rotary_interleaved": 1}
    heads.pop("local_window_size")
    assert run(fused.attention, *APART, model=plain, **names, **heads) == expected
    with pytest.raises(ValueError, match="its attributes are"):
        attend(*APART, **names)  # layer 2 has no window
    with pytest.raises(ValueError, match="its attributes are"):
        attend(*APART, local_window_size=8)


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("inputs", [JOINED, APART], ids=["joined", "apart"])
def test_attention_of_other_widths(at: int, inputs: tuple[Value | None, ...]) -> None:
    for other in others(inputs[at]):
        with pytest.raises(ValueError, match=r"input [012] is"):
            attend(*inputs[:at], other, *inputs[at + 1 :])


@pytest.mark.parametrize("at", [*PLACES])
def test_attention_over_other_places(at: int) -> None:
    for name in ("keys.2", "keys.3", "keys.-1", "keys.01", "x", "", "keys.1", "values.1"):
        if name != PLACES[at]:
            with pytest.raises(ValueError, match="its inputs are"):
                attend(*APART, names=PLACES | {at: name})


def test_attention_over_a_layer_that_is_none() -> None:
    """Not even where everything is named alike: a tensor could have these names."""
    for layer in ("-1", "3", "01"):
        names = {at: name.replace(".1", f".{layer}") for at, name in PLACES.items()}
        outputs = ("y", f"new_keys.{layer}", f"new_values.{layer}")
        with pytest.raises(ValueError, match="its inputs are"):
            attend(*APART, names=names, outputs=outputs)
    with pytest.raises(ValueError, match="its inputs are"):
        attend(*APART, outputs=("y", "new_values.1", "new_keys.1"))


@pytest.mark.parametrize("name", [*HEADS])
def test_attention_with_other_attributes(name: str) -> None:
    for value in (HEADS[name] + 1, float("nan")):
        with pytest.raises(ValueError, match="its attributes are"):
            attend(*APART, **{name: value})


X = (f32(1, "T", 32), f32("T", "slots"))
CODES = f32("slots", 4, 32)
CODE_NAMES = {2: "row_codes.1", 4: "row_codes.1.1"}
QUANTIZED = {2: "row_codes.1", 3: "row_scales.1", 5: "row_codes.1.1", 6: "row_scales.1.1"}
BITS = {"expert_weight_bits": 8, "block_size": 32}
MIXED = (fused.experts, (*X, CODES, None, CODES), {"names": CODE_NAMES})
QMIXED = (
    fused.quantized_experts,
    (*X, CODES, CODES, None, CODES, CODES),
    {"names": QUANTIZED, **BITS},
)


@pytest.mark.parametrize(("rule", "inputs", "options"), [MIXED, QMIXED], ids=["plain", "quantized"])
def test_experts(rule: Rule, inputs: tuple[Value | None, ...], options: dict[str, Any]) -> None:
    assert run(rule, *inputs, **options) == [f32(1, "T", 32)]
    for at, name in options["names"].items():
        wrong = {"row_codes.1", "row_codes.2", "row_scales.1", "row_codes.1.1", "row_codes.0", "x"}
        for other in wrong - {name}:
            fails(rule, *inputs, **(options | {"names": options["names"] | {at: other}}))
    for at, value in enumerate(inputs):
        if value is None or at < 2:
            for other_value in others(value):
                fails(rule, *inputs[:at], other_value, *inputs[at + 1 :], **options)
    dense = msgspec.structs.replace(MODEL, stem_layers=())
    fails(rule, *inputs, **options, model=dense)


def test_experts_of_other_bits_than_the_tables() -> None:
    rule, inputs, options = QMIXED
    for change in ({"expert_weight_bits": 4}, {"block_size": 16}):
        fails(rule, *inputs, **(options | change))
    fails(rule, *inputs, **options, layout=None)
