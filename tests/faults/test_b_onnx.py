"""Catalogue B1, B11, B12, B14 and B16: graphs for onnxruntime, checked before it sees them.

What only a run finds, and files for ggml: test_b_backbones.py, test_b_gguf.py. The format below the
graph: test_b_protobuf.py.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest
from contract import refused
from hostile_graphs import (
    Change,
    attribute,
    change_refused,
    changed,
    external,
    graph_of,
    graph_refused,
    inline,
    node,
    resealed,
)
from onnx import TensorProto, helper

import stem_edge
from stem_edge import disk, onnx_check
from stem_edge.bundle import BACKBONE_DATA, Bundle, open_manifest
from stem_edge.config import MAX_LAYERS
from stem_edge.errors import BundleError
from stem_edge.export import linear
from stem_edge.graph_io import Variant, graph_file
from stem_edge.onnx_check import check_graph, check_graphs
from stem_edge.onnx_operators import CONTRIB, OPERATORS

LATE, PREFILL, EMBED, HEAD = "late", "prefill", "embed", "head"
EXPORT = Path(linear.__file__).parent
DEMO = Path(stem_edge.__file__).parent / "demo_model"


@pytest.fixture(scope="module")
def quantized(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a graph for prompts."""
    out = tmp_path_factory.mktemp("quantized") / "out"
    stem_edge.export_bundle(
        tiny_checkpoint, out, backbone="int8", tables="int8", prefill_graph=True, asymmetric=True
    )
    return out


def check(bundle: Path, graph: str, data: bytes) -> None:
    check_graph(data, bundle / graph_file(graph), graph, stem_edge.open_bundle(bundle).manifest)


# What passes


def test_the_demo_passes() -> None:
    check_graphs(stem_edge.open_bundle(DEMO))


@pytest.mark.parametrize("tables", ["fp32", "fp16", "int8", "int4"])
def test_exports_pass(
    tables: Any, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a head in pieces; every architecture is loaded by test_architectures.py."""
    monkeypatch.setattr(linear, "SPLIT_VALUES", 100 * 32)
    out = tmp_path / "out"
    bundle = stem_edge.export_bundle(
        tiny_checkpoint, out, backbone="int4", tables=tables, asymmetric=tables == "int4"
    )
    check_graphs(bundle)
    assert "Concat" in {one.op_type for one in graph_of(out, HEAD).graph.node}


def test_the_exporter_writes_these_operators_and_no_others() -> None:
    emitted = set()
    for path in EXPORT.glob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            match call:
                case ast.Call(ast.Attribute(attr="node"), [ast.Constant(name), *arguments]):
                    names = [a.id for a in arguments if isinstance(a, ast.Name)]
                    emitted.add((CONTRIB if "CONTRIB" in names else "", name))
    assert emitted == set(OPERATORS)


def test_raw_bytes_of_small_tensors_may_be_anything(quantized: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        norm = next(t for t in model.graph.initializer if t.name == "layers.1.ffn_norm")
        norm.raw_data = b"\xff" * len(norm.raw_data)

    check(quantized, LATE, changed(quantized, LATE, change))


# What does not


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "0 bytes that begin with b''"),
        (b"\x08\x0a", "2 bytes have no graph"),
        (b"GGUF\x03\0\0\0", "begin with b'GGUF"),
        (b"<html><body>404</body></html>", "begin with b'<html>"),
        (b"PK\x03\x04", "expected an ONNX file"),
    ],
)
def test_b1_a_graph_that_is_something_else(tiny_bundle: Path, data: bytes, said: str) -> None:
    graph_refused(tiny_bundle, LATE, data, said)


def test_b1_a_graph_that_is_cut(tiny_bundle: Path) -> None:
    data = (tiny_bundle / graph_file(EMBED)).read_bytes()
    for end in range(len(data)):
        graph_refused(tiny_bundle, EMBED, data[:end])


def _entry(key: str, value: str, index: int = 0) -> Callable[[onnx.ModelProto], object]:
    def change(model: onnx.ModelProto) -> None:
        for entry in external(model, index).external_data:
            if entry.key == key:
                entry.value = value

    return change


@pytest.mark.parametrize(
    "location", ["../outside", "/etc/passwd", "prefill.onnx.data", "C:\\x", "", "x\0y", "é" * 500]
)
def test_b11_weights_in_another_file(quantized: Path, location: str) -> None:
    change_refused(quantized, LATE, _entry("location", location), BACKBONE_DATA, "expected")


@pytest.mark.parametrize("value", ["-64", "+64", " 64", "6_4", "0x40", "٦٤", "", "9" * 30])
@pytest.mark.parametrize("key", ["offset", "length"])
def test_b11_places_that_are_no_numbers(quantized: Path, key: str, value: str) -> None:
    change_refused(quantized, LATE, _entry(key, value), f"has {key}", "expected a number")


@pytest.mark.parametrize("offset", [1 << 20, 1 << 62, 9 * 10**18, 1, 63])
def test_b11_weights_beyond_their_file(quantized: Path, offset: int) -> None:
    change_refused(quantized, LATE, _entry("offset", str(offset)), "aligned", BACKBONE_DATA)


@pytest.mark.parametrize("length", [0, 1, 1 << 62])
def test_b11_weights_of_another_length(quantized: Path, length: int) -> None:
    change_refused(quantized, LATE, _entry("length", str(length)), f"its length is {length}")


OTHER_PLACES: dict[str, tuple[Callable[[onnx.ModelProto], object], str]] = {
    "an unknown key": (
        lambda m: external(m).external_data.add(key="checksum", value="0"),
        "checksum",
    ),
    "a key twice": (
        lambda m: external(m).external_data.add(key="offset", value="0"),
        "more than once",
    ),
    "a key less": (lambda m: external(m).external_data.pop(), "expected location"),
    "both": (lambda m: setattr(external(m), "raw_data", b"1234"), "both in the graph and"),
    "entries, but not said to be external": (
        lambda m: setattr(external(m), "data_location", 0),
        "or nowhere",
    ),
    "said to be external, no entries": (
        lambda m: setattr(inline(m), "data_location", 1),
        "both in the graph and",
    ),
    "too few bytes in the graph": (
        lambda m: setattr(inline(m), "raw_data", inline(m).raw_data[:-1]),
        "bytes in the graph",
    ),
    "more bytes than there should be in a graph": (
        lambda m: m.graph.initializer.append(
            TensorProto(name="x", data_type=1, dims=[300], raw_data=bytes(1200))
        ),
        "1024 at most",
    ),
    "negative dims": (lambda m: external(m).dims.__setitem__(0, -2), "expected positive"),
    "dims whose product wraps": (
        lambda m: external(m).dims.extend([1 << 62]),
        "its length is",
    ),
    "dims without end": (lambda m: external(m).dims.extend([1] * 9), "more than 4 dims"),
    "an element type of strings": (lambda m: setattr(external(m), "data_type", 8), "type 8"),
    "a sparse tensor": (
        lambda m: m.graph.sparse_initializer.add(dims=[4]),
        "sparse_initializer",
    ),
    "the name of an input": (lambda m: setattr(inline(m), "name", "hidden"), "hidden"),
    "a name twice": (lambda m: setattr(inline(m), "name", external(m).name), "more than once"),
}


@pytest.mark.parametrize("case", OTHER_PLACES)
def test_b11_tensors(quantized: Path, case: str) -> None:
    change_refused(quantized, LATE, *OTHER_PLACES[case])


def test_b11_a_tensor_in_a_node(quantized: Path) -> None:
    """Not only initializers: the value that ConstantOfShape fills with is a tensor, too."""

    def change(model: onnx.ModelProto) -> None:
        tensor = attribute(model, "ConstantOfShape", "value").t
        tensor.ClearField("int32_data")
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", "/etc/passwd"), ("offset", "0"), ("length", "1")):
            tensor.external_data.add(key=key, value=value)

    change_refused(quantized, PREFILL, change, "attribute 'value' lies in a file")


def test_b11_links_in_the_place_of_files(tiny_bundle: Path, tmp_path: Path) -> None:
    """Put there after the bundle was opened; before, opening refuses them."""
    copy = resealed(tiny_bundle, tmp_path / "copy", {})
    bundle = stem_edge.open_bundle(copy)
    for name in (graph_file(LATE), BACKBONE_DATA):
        kept = (copy / name).rename(tmp_path / name)
        (copy / name).symlink_to(kept)
        refused(lambda: check_graphs(bundle), BundleError, copy / name, "not a regular file")
        (copy / name).unlink()
        refused(lambda: check_graphs(bundle), BundleError, copy / name, "No such file")
        kept.rename(copy / name)
    check_graphs(bundle)
    with (copy / BACKBONE_DATA).open("ab") as file:
        file.write(b"more")
    refused(lambda: check_graphs(bundle), BundleError, copy / BACKBONE_DATA, "expected")


def test_b11_weights_in_the_same_place(quantized: Path, tmp_path: Path) -> None:
    """Each would be packed into memory of its own: many of them are more than any file accounts for."""

    def change(model: onnx.ModelProto) -> None:
        one, other = (external(model, index) for index in (0, 1))
        offset = next(entry.value for entry in one.external_data if entry.key == "offset")
        next(entry for entry in other.external_data if entry.key == "offset").value = offset

    data = changed(quantized, LATE, change)
    copy = resealed(quantized, tmp_path / "copy", {graph_file(LATE): data})
    refused(lambda: stem_edge.load(copy, trial=False), BundleError, copy / BACKBONE_DATA, "overlap")


def test_b11_weights_that_are_used_twice(quantized: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        other = model.graph.node.add()
        other.CopyFrom(node(model, "MatMulNBits"))
        other.output[0] = "again"

    change_refused(quantized, LATE, change, "used 2 times")


FOREIGN: dict[str, tuple[Callable[[onnx.ModelProto], object], tuple[str, ...]]] = {
    "a domain": (lambda m: setattr(node(m, "Mul"), "domain", "evil.ops"), ("'Mul'", "'evil.ops'")),
    "an operator": (lambda m: setattr(node(m, "Mul"), "op_type", "Loop"), ("'Loop'", "''")),
    "no operator": (lambda m: node(m, "Mul").ClearField("op_type"), ("operator",)),
    "a domain that is imported": (
        lambda m: m.opset_import.append(helper.make_opsetid("evil.ops", 1)),
        ("evil.ops", "com.microsoft"),
    ),
    "another version": (lambda m: setattr(m.opset_import[0], "version", 22), ("22", "21")),
    "another format": (lambda m: setattr(m, "ir_version", 11), ("11", "10")),
    "a function": (lambda m: m.functions.add(name="f"), ("functions",)),
    "training": (lambda m: m.training_info.add(), ("training_info",)),
    "metadata": (lambda m: m.metadata_props.add(key="a", value="b"), ("field 14",)),
    "the body of a loop": (
        lambda m: node(m, "Mul").attribute.append(helper.make_attribute("body", m.graph)),
        ("a subgraph",),
    ),
    "a reference to an attribute": (
        lambda m: node(m, "Mul").attribute.add(name="a", ref_attr_name="b", type=2),
        ("ref_attr_name",),
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_b12_operators_of_others(quantized: Path, case: str) -> None:
    change, said = FOREIGN[case]
    change_refused(quantized, LATE, change, *said)


def _value(model: onnx.ModelProto, name: str) -> Any:
    values = [*model.graph.input, *model.graph.output]
    return next(value for value in values if value.name == name).type.tensor_type


INTERFACES: dict[str, tuple[Callable[[onnx.ModelProto], object], tuple[str, ...]]] = {
    "a name": (
        lambda m: setattr(m.graph.input[0], "name", "hiden"),
        ("input hidden is missing, expected float32 [1, T, 32]", "hiden"),
    ),
    "a type": (
        lambda m: setattr(_value(m, "slot_ids"), "elem_type", 6),
        ("input slot_ids is int32 [1, T], expected int64 [1, T]",),
    ),
    "a rank": (
        lambda m: _value(m, "hidden").shape.dim.pop(),
        ("input hidden is float32 [1, T], expected float32 [1, T, 32]",),
    ),
    "a width": (
        lambda m: setattr(_value(m, "new_hidden").shape.dim[2], "dim_value", 31),
        ("output new_hidden is float32 [1, T, 31], expected float32 [1, T, 32]",),
    ),
    "no shape": (
        lambda m: _value(m, "keys.1").ClearField("shape"),
        ("keys.1 is float32 of any shape, expected float32 [1, 2, capacity, 16]",),
    ),
    "a shape of rows": (
        lambda m: _value(m, "row_codes.1").shape.dim.add(dim_value=7),
        ("row_codes.1 is uint8 [7], expected uint8 of any shape",),
    ),
    "another output": (
        lambda m: m.graph.output.add(name="z", type=m.graph.output[0].type),
        ("output z is none of this graph's",),
    ),
    "an input twice": (
        lambda m: m.graph.input.append(m.graph.input[0]),
        ("more than once",),
    ),
    "an output that nothing makes": (lambda m: m.graph.node.pop(), ("new_hidden", "not made")),
}


@pytest.mark.parametrize("case", INTERFACES)
def test_b14_inputs_and_outputs(quantized: Path, case: str) -> None:
    change, said = INTERFACES[case]
    change_refused(quantized, LATE, change, *said)


def test_b14_the_first_differences_are_named(quantized: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        del model.graph.input[:]

    change_refused(quantized, LATE, change, "and 12 more")


def test_b14_graphs_that_took_places(quantized: Path) -> None:
    data = (quantized / graph_file(HEAD)).read_bytes()
    graph_refused(quantized, EMBED, data, "input token_ids is missing")


@pytest.mark.parametrize("layers", [3, MAX_LAYERS])
def test_b16_a_graph_that_is_too_large(tiny_bundle: Path, layers: int) -> None:
    manifest = stem_edge.open_bundle(tiny_bundle).manifest
    model = msgspec.structs.replace(manifest.model, n_layers=layers)
    manifest = msgspec.structs.replace(manifest, model=model)
    limit = min(onnx_check.MAX_GRAPH_NBYTES, onnx_check.LAYER_NBYTES * (layers + 16))
    refused(
        lambda: check_graph(bytes(limit + 1), Path("late.onnx"), LATE, manifest),
        BundleError,
        f"more than {limit} bytes",
    )


def test_b15_more_operators_than_a_graph_has(tiny_bundle: Path) -> None:
    """Each keeps its result, so thousands of small ones take gigabytes."""
    manifest = stem_edge.open_bundle(tiny_bundle).manifest

    def many(model: onnx.ModelProto) -> None:
        names = [f"unused{number}" for number in range(20)]
        model.graph.node.extend([helper.make_node("Tanh", ["hidden"], [name]) for name in names])

    data = changed(tiny_bundle, HEAD, many)
    refused(
        lambda: check_graph(data, Path("head.onnx"), HEAD, manifest),
        BundleError,
        "operators, expected at most 16",
    )


def test_b16_no_more_is_read_than_a_graph_may_have(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = resealed(tiny_bundle, tmp_path / "copy", {})
    with (copy / graph_file(LATE)).open("r+b") as file:
        file.truncate(3 << 30)  # sparse: more than any protobuf may have
    limits = []

    def read(path: Path, limit: int) -> bytes:
        limits.append(limit)
        return read_file(path, limit)

    read_file = disk.read_file
    monkeypatch.setattr(disk, "read_file", read)
    bundle = stem_edge.open_bundle(tiny_bundle)
    moved = Bundle(copy, bundle.manifest)
    refused(lambda: check_graphs(moved), BundleError, copy / graph_file(LATE), "more than")
    assert max(limits) == onnx_check.MAX_GRAPH_NBYTES


# Variants for accelerators: the same checks


def variant_refused(bundle: Path, graph: str, variant: Variant, change: Change, *said: str) -> None:
    """A graph of a variant is refused after a change, and is not without it."""
    path, manifest = bundle / graph_file(graph, variant), open_manifest(bundle)
    model = onnx.load_model(str(path), load_external_data=False)
    check_graph(model.SerializeToString(), path, graph, manifest, variant)
    change(model)
    data = model.SerializeToString()
    refused(lambda: check_graph(data, path, graph, manifest, variant), BundleError, path, *said)


def first(operator: str, name: str, value: object) -> Change:
    """A change of a field of the first node of an operator."""
    return lambda model: setattr(node(model, operator), name, value)


def test_b12_variants_have_their_own_operators() -> None:
    variant_refused(DEMO, LATE, "fp16", first("Mul", "op_type", "MoE"), "'MoE'")
    variant_refused(DEMO, LATE, "portable", first("Mul", "domain", CONTRIB), "'Mul'")
    variant_refused(DEMO, "rows", "fp32", first("ScatterND", "op_type", "Add"), "'Add'")
    variant_refused(DEMO, "top", "fp32", first("TopK", "op_type", "ScatterND"), "'ScatterND'")
    opset = helper.make_opsetid(CONTRIB, 1)
    variant_refused(DEMO, HEAD, "portable", lambda m: m.opset_import.append(opset), CONTRIB)


def test_b14_variants_have_their_own_inputs_and_outputs() -> None:
    cases: list[tuple[Variant, str, int]] = [("fp16", "float16", 1), ("fp32", "float32", 10)]
    for variant, found, other in cases:
        said = f"expected {found} [1, T, 128]"
        change = partial(_retype, name="hidden", kind=other)
        variant_refused(DEMO, LATE, variant, change, said)
    variant_refused(
        DEMO, HEAD, "fp16", lambda m: setattr(_value(m, "logits"), "elem_type", 10), "float32 [1, n"
    )
    variant_refused(DEMO, HEAD, "fp32", lambda m: m.graph.input.pop(), "wanted is missing")
    variant_refused(
        DEMO, "rows", "fp16", lambda m: _value(m, "records").shape.dim.pop(), "records is int32 [n]"
    )
    variant_refused(
        DEMO, "top", "fp16", lambda m: _value(m, "count").shape.dim.pop(), "count is int64 []"
    )
    data = (DEMO / graph_file(LATE)).read_bytes()
    path, manifest = DEMO / "x.onnx", open_manifest(DEMO)
    refused(lambda: check_graph(data, path, LATE, manifest, "fp16"), BundleError, "expected")


def _retype(model: onnx.ModelProto, name: str, kind: int) -> None:
    _value(model, name).elem_type = kind


def _append(model: onnx.ModelProto, nodes: list[onnx.NodeProto]) -> None:
    model.graph.node.extend(nodes)


def test_b14_names_of_inputs_are_those_of_the_variant() -> None:
    """An output that is called as an input of another graph would be taken for it by a rule."""
    for graph, name in ((HEAD, "slots"), ("rows", "wanted"), ("top", "logits")):
        extra = helper.make_node("Tanh" if graph == HEAD else "Split", ["x"], [name])
        change = partial(_append, nodes=[extra])
        variant_refused(DEMO, graph, "fp32", change, "name of an input")


def test_b15_more_operators_than_a_variant_has() -> None:
    cases: list[tuple[str, Variant, int]] = [(HEAD, "fp16", 16), ("rows", "fp16", 592)]
    for graph, variant, most in [*cases, (HEAD, "portable", 48)]:
        names = [f"unused{number}" for number in range(most + 1)]
        nodes = [helper.make_node("Tanh", ["hidden"], [name]) for name in names]
        said = f"operators, expected at most {most}"
        variant_refused(DEMO, graph, variant, partial(_append, nodes=nodes), said)


def test_b11_weights_are_shared_by_variants_and_within_one_they_are_not(tmp_path: Path) -> None:
    name = graph_file(LATE, "fp16")
    model = onnx.load_model(str(DEMO / name), load_external_data=False)
    shared = {n for n, t in ((t.name, t) for t in model.graph.initializer) if t.external_data}
    plain = {t.name for t in graph_of(DEMO, LATE).graph.initializer if t.external_data}
    assert shared == plain
    one, other = (external(model, index) for index in (0, 1))
    offset = next(entry.value for entry in one.external_data if entry.key == "offset")
    next(entry for entry in other.external_data if entry.key == "offset").value = offset
    copy = resealed(DEMO, tmp_path / "copy", {name: model.SerializeToString()})
    bundle = stem_edge.open_bundle(copy)
    refused(lambda: check_graphs(bundle), BundleError, copy / BACKBONE_DATA, "overlap")


def test_b11_every_graph_of_a_variant_is_read(tmp_path: Path) -> None:
    for graph, variant in open_manifest(DEMO).all_graphs():
        name = graph_file(graph, variant)
        copy = resealed(DEMO, tmp_path / name, {name: b"no graph"})
        bundle = stem_edge.open_bundle(copy)
        check = partial(check_graphs, bundle)
        refused(check, BundleError, copy / name, "begin with b'no graph'")
