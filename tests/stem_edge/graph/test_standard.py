"""Graphs for accelerators: only ONNX's own operators, over the same bytes of weights."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
import pytest
from architectures import HASHED, QUANTIZED, SIZES, VARIANTS, quantized, write
from exact_models import GEMMA, GEMMA_3N, GEMMAS, published
from msgspec.structs import replace
from tiers import slow_but

import stem_edge
from stem_edge.bundle.opening import Bundle
from stem_edge.config import ModelConfig
from stem_edge.graph.decode import decoding
from stem_edge.graph.device.standard import graphs, obstacle
from stem_edge.graph.encoder import encode
from stem_edge.graph.formats import BackboneFormat
from stem_edge.graph.ir import Graph
from stem_edge.runtime.backends.onnxruntime.providers.graphs import format_of
from stem_edge.tables.packing import make_layout

# Only those whose graphs have nodes that no other has.
DISTINCT = ["stem", "dense", "stem-mix", "gate", "q and k norm, halves", "windows"]
DISTINCT += [GEMMA, GEMMA_3N]


@pytest.fixture(
    scope="module", params=slow_but([*DISTINCT, "int4 with offsets"], [*DISTINCT, *QUANTIZED])
)
def bundle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bundle]:
    folder = tmp_path_factory.mktemp("bundle")
    if request.param in QUANTIZED:
        yield quantized(folder, request.param)[0]
        return
    if request.param in GEMMAS:
        yield stem_edge.open_bundle(published(folder, request.param, ggml=False).path)
        return
    path, _, _ = write(folder / "checkpoint", ModelConfig(**(SIZES | VARIANTS[request.param])))
    yield stem_edge.export_bundle(path, folder / "bundle", type="fp32", rows="fp32")


def places(built: dict[str, Graph]) -> set[tuple[str, str, int, int]]:
    """Name, file, offset and size of every weight that graphs read."""
    tensors = [tensor for graph in built.values() for tensor in graph.tensors.values()]
    return {(t.name, t.file, t.offset, t.nbytes) for t in tensors if t.data is None}


def test_graphs_are_valid_onnx_of_its_own_operators(bundle: Bundle) -> None:
    described = bundle.manifest.model, bundle.manifest.tables, format_of(bundle)
    built = graphs(*described)
    for name, graph in built.items():
        path = bundle.path / f"{name}.onnx"
        path.write_bytes(encode(graph))
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load_model(str(path), load_external_data=False)
        assert {node.domain for node in model.graph.node} == {""}
    assert places(built) <= places(decoding(*described).graphs)


def test_what_has_no_such_graphs_says_why() -> None:
    plain, hashed = ModelConfig(**SIZES), ModelConfig(**(SIZES | HASHED))
    experts = make_layout(5, hashed.stem_layers, hashed.row_parts(), "int8", 16)
    format = BackboneFormat(weights="int4", head="int8", block_size=32)
    assert obstacle(plain, None, format) == ""
    assert "experts" in obstacle(hashed, experts, format)
    assert "2 bits" in obstacle(plain, None, replace(format, kinds={"down": "int2"}))
