"""Limits of portable graphs: what each rule takes and makes, and graphs that break them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest
from conftest import DEMO
from contract import refused
from graph_steps import LAYOUT, MODEL, Made, f32, fails, i64, others, run, sizes, u8
from hostile_graphs import attribute, external, node
from onnx import TensorProto, helper

from stem_edge import onnx_portable as rules
from stem_edge.bundle import Manifest, open_bundle
from stem_edge.errors import BundleError
from stem_edge.export.portable import lower
from stem_edge.graph_io import Value, decode_graphs, graph_file
from stem_edge.onnx_check import check_graph
from stem_edge.onnx_file import Tensor
from stem_edge.onnx_portable import OPERATORS, OPSETS
from stem_edge.onnx_rules import Rule
from stem_edge.portable_io import portable_inputs, portable_outputs

FILLING = Tensor("v", "uint8", (1,), None, None)
HEADS = (2, 2)  # kv heads, and heads that share one's keys
CACHE, NEW = f32(1, 2, "P", 16), f32(1, 2, "T", 16)
TOKENS = {1: "token_ids"}
CHOSEN = {0: "hidden", 1: "wanted"}


def u4(*shape: int | str) -> Value:
    return Value("uint4", shape)


Case = tuple[Rule, tuple[Value | None, ...], dict[str, Any], Made]
FITTING: dict[str, Case] = {
    "floats": (rules.cast, (u8(1, "T", 8),), {"to": 1}, [f32(1, "T", 8)]),
    "half bytes": (rules.cast, (u8(6, 8),), {"to": 21}, [u4(6, 8)]),
    "logits": (
        rules.concat,
        (f32(1, "n", 100), f32(1, "n", 100), f32(1, "n", 100)),
        {"axis": -1},
        [f32(1, "n", 300)],
    ),
    "halves": (
        rules.concat,
        (f32(1, "T", 4, 8), f32(1, "T", 4, 8)),
        {"axis": -1},
        [f32(1, "T", 4, 16)],
    ),
    "cache": (rules.concat, (CACHE, NEW), {"axis": 2}, [f32(1, 2, "P+T", 16)]),
    "zero points": (rules.constant_of_shape, (sizes(300, 4),), {"value": FILLING}, [u8(300, 4)]),
    "codes": (
        rules.dequantize,
        (u4(6, 96), f32(6, 3), u4(6, 3)),
        {"block_size": 32},
        [f32(6, 96)],
    ),
    "bytes": (rules.dequantize, (u8(6, 96), f32(6, 3), u8(6, 3)), {"block_size": 32}, [f32(6, 96)]),
    "ids": (rules.gather, (u8(300, 16), i64(1, "T")), {"names": TOKENS}, [u8(1, "T", 16)]),
    "wanted": (
        rules.gather,
        (f32(1, "T", 32), i64("n")),
        {"names": CHOSEN, "axis": 1},
        [f32(1, "n", 32)],
    ),
    "matrix": (rules.matmul, (f32(1, "T", 32), f32(32, 5)), {}, [f32(1, "T", 5)]),
    "scores": (
        rules.matmul,
        (f32(*HEADS, "T", 16), f32(2, 1, 16, "P+T")),
        {},
        [f32(*HEADS, "T", "P+T")],
    ),
    "mixed": (
        rules.matmul,
        (f32(*HEADS, "T", "P+T"), f32(2, 1, "P+T", 16)),
        {},
        [f32(*HEADS, "T", 16)],
    ),
    "mean": (rules.reduce_mean, (f32(1, "T", 32), sizes(-1)), {}, [f32(1, "T", 1)]),
    "second half": (
        rules.cut,
        (f32(1, "T", 4, 16), sizes(8), sizes(16), sizes(-1), sizes(1)),
        {},
        [f32(1, "T", 4, 8)],
    ),
    "every second": (
        rules.cut,
        (f32("T", 7), sizes(0), sizes(7), sizes(-1), sizes(2)),
        {},
        [f32("T", 4)],
    ),
    "weights": (rules.softmax, (f32(*HEADS, "T", "P+T"),), {}, [f32(*HEADS, "T", "P+T")]),
    "turned": (rules.transpose, (f32(5, 32),), {"perm": (1, 0)}, [f32(32, 5)]),
    "heads": (
        rules.transpose,
        (f32(1, "T", 4, 16),),
        {"perm": (0, 2, 1, 3)},
        [f32(1, 4, "T", 16)],
    ),
    "angles": (rules.unsqueeze, (f32("T", 8), sizes(1)), {}, [f32("T", 1, 8)]),
}


@pytest.mark.parametrize("case", FITTING)
def test_what_fits(case: str) -> None:
    rule, inputs, options, expected = FITTING[case]
    assert run(rule, *inputs, **options) == expected


FLEXIBLE = (rules.reduce_mean, rules.cut)  # of lines of any width


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


CODES = (u4(6, 96), f32(6, 3), u4(6, 3))
HALF = f32(1, "T", 4, 8)
LINE = f32(1, "T", 16)
REFUSED: list[tuple[Rule, tuple[Value | None, ...], dict[str, Any]]] = [
    (rules.cast, (f32(1),), {"to": 1}),
    (rules.concat, (f32(1, "n", 100), f32(1, "n", 201)), {"axis": -1}),
    (rules.concat, (f32(1, "T", 1), f32(2, "T", 1)), {"axis": -1}),
    (rules.concat, (f32("T", 2, 2, 17), f32("T", 2, 2, 17)), {"axis": -1}),  # more than a line
    (rules.concat, (HALF, f32(1, "T", 4, 7)), {"axis": -1}),
    (rules.concat, (HALF, HALF, HALF), {"axis": -1}),
    (rules.concat, (f32(1, 2, 16, "T"), f32(1, 2, 16, "T")), {"axis": -1}),
    (rules.concat, (CACHE, CACHE), {"axis": 2}),
    (rules.concat, (NEW, NEW), {"axis": 2}),
    (rules.concat, (CACHE, NEW, NEW), {"axis": 2}),
    (rules.constant_of_shape, (sizes(300, 5),), {"value": FILLING}),
    (rules.constant_of_shape, (sizes(301, 4),), {"value": FILLING}),
    (rules.constant_of_shape, (sizes(300),), {"value": FILLING}),
    (rules.constant_of_shape, (sizes(300, 4, 1),), {"value": FILLING}),
    (rules.constant_of_shape, (sizes("T", 4),), {"value": FILLING}),
    (rules.constant_of_shape, (sizes(300, 0),), {"value": FILLING}),
    (rules.constant_of_shape, (sizes(-300, 4),), {"value": FILLING}),
    (rules.constant_of_shape, (i64(2),), {"value": FILLING}),
    (rules.constant_of_shape, (sizes(300, 4),), {"value": FILLING._replace(dims=(2,))}),
    (rules.constant_of_shape, (sizes(300, 4),), {"value": FILLING._replace(type="int8")}),
    *((rules.dequantize, CODES, {"block_size": block}) for block in (16, 64)),
    (rules.dequantize, (u4(6, 1, 96), *CODES[1:]), {"block_size": 32}),
    (rules.dequantize, (*CODES[:2], u8(6, 3)), {"block_size": 32}),
    (rules.gather, (u8(300, 16), i64(1, "T")), {}),
    (rules.gather, (u8(301, 16), i64(1, "T")), {"names": TOKENS}),
    (rules.gather, (u8(300), i64(1, "T")), {"names": TOKENS}),
    (rules.gather, (u8(300, "T"), i64(1, "T")), {"names": TOKENS}),
    (rules.gather, (f32(1, "T", 32), i64("n")), {"axis": 1}),
    (rules.gather, (f32(1, "T", 32), i64("n")), {"axis": 1, "names": {0: "hidden"}}),
    (rules.gather, (f32(1, "T", 32), i64("n")), {"axis": 1, "names": {1: "wanted"}}),
    (rules.matmul, (f32(1, "T", 32), f32(32, "n")), {}),
    (rules.matmul, (f32(1, "T", 32), f32(31, 5)), {}),
    (rules.matmul, (f32("T", 32), f32(32, 5)), {}),
    (rules.matmul, (f32(1, "T", 32), f32(1, 32, 5)), {}),
    (rules.matmul, (f32(1, 4, "T", 16), f32(1, 4, 16, "P+T")), {}),
    (rules.matmul, (f32(*HEADS, "T", 16), f32(2, 1, 16, "T")), {}),
    (rules.matmul, (f32(*HEADS, "T", 8), f32(2, 1, 8, "P+T")), {}),
    (rules.reduce_mean, (f32(1, "T", 32), sizes(2)), {}),
    (rules.reduce_mean, (f32(1, 2, "T"), sizes(-1)), {}),
    (rules.cut, (LINE, sizes(0), sizes(17), sizes(-1), sizes(1)), {}),
    (rules.cut, (LINE, sizes(8), sizes(8), sizes(-1), sizes(1)), {}),
    (rules.cut, (LINE, sizes(-8), sizes(8), sizes(-1), sizes(1)), {}),
    (rules.cut, (LINE, sizes(0), sizes(8), sizes(2), sizes(1)), {}),
    (rules.cut, (LINE, sizes(0), sizes(8), sizes(-1), sizes(0)), {}),
    (rules.cut, (LINE, sizes(0), sizes(8), sizes(-1), sizes(3)), {}),
    (rules.cut, (LINE, sizes(0), sizes(8), sizes(-1), sizes("T")), {}),
    (rules.cut, (LINE, sizes(0, 1), sizes(8, 9), sizes(-1), sizes(1)), {}),
    (rules.softmax, (f32(*HEADS, "T", 16),), {}),
    (rules.softmax, (f32(),), {}),
    (rules.transpose, (f32(5, 32, 1),), {"perm": (1, 0)}),
    (rules.transpose, (f32(5, 32),), {"perm": (0, 2, 1, 3)}),
    (rules.unsqueeze, (f32("T", 8), sizes(0)), {}),
    (rules.unsqueeze, (f32(1, "T", 8), sizes(1)), {}),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_does_not_fit(number: int) -> None:
    rule, inputs, options = REFUSED[number]
    fails(rule, *inputs, **options)


def test_operators_are_those_of_onnx_alone() -> None:
    assert OPSETS == {"": 21}
    assert {domain for domain, _ in OPERATORS} == {""}
    assert OPERATORS["", "Transpose"].attributes["perm"] == (
        (1, 0), (0, 2, 1, 3), (1, 0, 2, 3), (1, 0, 3, 2),
    )  # fmt: skip
    assert OPERATORS["", "Concat"].inputs == tuple(range(2, 4096))


def test_inputs_and_outputs_of_every_graph() -> None:
    """MODEL has a window of 7 in layer 1, which is its STEM layer; heads are padded to 16."""
    hidden, cache, new = f32(1, "T", 32), f32(1, 2, "P", 16), f32(1, 2, "T", 16)
    angles = {"rope_cos": f32("T", 8), "rope_sin": f32("T", 8)}
    assert portable_inputs("embed", MODEL, LAYOUT) == {"token_ids": i64(1, "T")}
    assert portable_outputs("embed", MODEL) == {"new_hidden": hidden}
    assert portable_inputs("head", MODEL, LAYOUT) == {"hidden": hidden, "wanted": i64("n")}
    assert portable_outputs("head", MODEL) == {"logits": f32(1, "n", 300)}
    early = {"hidden": hidden, "mask.0": f32("T", "P+T"), "keys.0": cache, "values.0": cache}
    assert portable_inputs("early", MODEL, LAYOUT) == angles | early
    late = {f"{name}.{layer}": cache for name in ("keys", "values") for layer in (1, 2)}
    late |= {"hidden": hidden, "mask.0": f32("T", "P+T"), "mask.7": f32("T", "P+T")}
    assert portable_inputs("late", MODEL, None) == angles | late
    row = {"row.1": f32(1, "T", 256)}
    assert portable_inputs("late", MODEL, LAYOUT) == angles | late | row
    made = {f"new_{name}.{layer}": new for name in ("keys", "values") for layer in (1, 2)}
    assert portable_outputs("late", MODEL) == {"new_hidden": hidden} | made


# ---------------------------------------------------------------- whole graphs


class Portable(NamedTuple):
    """A bundle and its portable graphs."""

    path: Path
    manifest: Manifest
    graphs: dict[str, onnx.ModelProto]

    def refused(self, graph: str, change: Callable[[onnx.ModelProto], object], *naming: str) -> str:
        """The message with which a graph is refused after a change."""
        model = onnx.ModelProto()
        model.CopyFrom(self.graphs[graph])
        change(model)
        path = self.path / graph_file(graph, "portable")
        return refused(lambda: self.check(graph, model), BundleError, path, *naming, seconds=30)

    def check(self, graph: str, model: onnx.ModelProto) -> None:
        path = self.path / graph_file(graph, "portable")
        check_graph(model.SerializeToString(), path, graph, self.manifest, "portable")


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Portable:
    path = tmp_path_factory.mktemp("portable") / "demo"
    shutil.copytree(DEMO, path)
    manifest = open_bundle(path).manifest
    graphs = {}
    for graph in decode_graphs(manifest.model):
        plain = onnx.load_model(str(path / graph_file(graph)), load_external_data=False)
        graphs[graph] = lower(graph, plain, manifest.model, manifest.tables)
    return Portable(path, manifest, graphs)


def test_what_the_exporter_writes_is_accepted(portable: Portable) -> None:
    for graph, model in portable.graphs.items():
        portable.check(graph, model)


def test_other_operators_are_refused(portable: Portable) -> None:
    def contributed(model: onnx.ModelProto) -> None:
        found = node(model, "Sigmoid")
        found.op_type, found.domain = "QuickGelu", "com.microsoft"

    def unknown(model: onnx.ModelProto) -> None:
        node(model, "Sigmoid").op_type = "Exp"

    def opset(model: onnx.ModelProto) -> None:
        model.opset_import.add(domain="com.microsoft", version=1)

    portable.refused("early", contributed, "QuickGelu")
    portable.refused("early", unknown, "Exp")
    portable.refused("early", opset, "operator sets")


def test_other_attributes_are_refused(portable: Portable) -> None:
    def perm(model: onnx.ModelProto) -> None:
        attribute(model, "Transpose", "perm").ints[:] = [0, 1]

    def block(model: onnx.ModelProto) -> None:
        attribute(model, "DequantizeLinear", "block_size").i = 64

    def filling(model: onnx.ModelProto) -> None:
        tensor = helper.make_tensor("value", TensorProto.INT8, [1], [8])
        attribute(model, "ConstantOfShape", "value").t.CopyFrom(tensor)

    portable.refused("early", perm, "perm")
    portable.refused("early", block, "DequantizeLinear")
    portable.refused("early", filling, "ConstantOfShape")


def test_weights_of_other_types_and_places_are_refused(portable: Portable) -> None:
    def eight_bits(model: onnx.ModelProto) -> None:
        found = next(t for t in model.graph.initializer if t.data_type == TensorProto.UINT4)
        found.data_type = TensorProto.UINT8

    def beyond(model: onnx.ModelProto) -> None:
        entry = next(e for e in external(model).external_data if e.key == "offset")
        entry.value = str(1 << 40)

    def twice(model: onnx.ModelProto) -> None:
        more = helper.make_node("Floor", [node(model, "DequantizeLinear").input[1]], ["more"])
        model.graph.node.append(more)

    def wide(model: onnx.ModelProto) -> None:
        sizes = node(model, "ConstantOfShape").input[0]
        found = next(t for t in model.graph.initializer if t.name == sizes)
        found.raw_data = (1 << 31).to_bytes(8, "little") * 2

    portable.refused("early", eight_bits, "bytes")
    portable.refused("early", beyond, "ends beyond")
    portable.refused("early", twice, "used 2 times")
    portable.refused("early", wide, "ConstantOfShape")


def test_other_inputs_and_outputs_are_refused(portable: Portable) -> None:
    def no_mask(model: onnx.ModelProto) -> None:
        kept = [value for value in model.graph.input if value.name != "mask.0"]
        del model.graph.input[:]
        model.graph.input.extend(kept)

    def longer(model: onnx.ModelProto) -> None:
        found = next(value for value in model.graph.output if value.name == "new_keys.0")
        found.type.tensor_type.shape.dim[2].dim_param = "P+T"

    def all_places(model: onnx.ModelProto) -> None:
        model.graph.node[0].input[1] = "sizes.-1"

    portable.refused("early", no_mask, "mask.0")
    portable.refused("early", longer, "new_keys.0")
    portable.refused("head", all_places, "Gather")


def test_what_grows_without_end_is_refused(portable: Portable) -> None:
    """Each of these nodes would double a value."""

    def doubled(model: onnx.ModelProto) -> None:
        x = node(model, "Sub").input[0]
        for n in range(8):
            name = f"more.{n}"
            model.graph.node.append(helper.make_node("Concat", [x, x], [name], axis=-1))
            x = name

    portable.refused("early", doubled, "Concat")
