"""Portable graphs: only ONNX's own operators, over the same bytes of weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx
import pytest
from architectures import HASHED, QUANTIZED, SIZES, VARIANTS, quantized, write

import stem_edge
from stem_edge.bundle.opening import Bundle
from stem_edge.config import ModelConfig
from stem_edge.graph.formats import BackboneFormat
from stem_edge.graph.portable import obstacle
from stem_edge.runtime.backends.onnxruntime.providers.graphs import variant_graphs
from stem_edge.tables.rows import make_layout

# Only those whose graphs have nodes that no other has.
DISTINCT = ["stem", "dense", "stem-plus", "low rank, gate", "q and k norm, halves", "all at once"]


@pytest.fixture(scope="module", params=[*DISTINCT, *QUANTIZED])
def bundle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bundle]:
    folder = tmp_path_factory.mktemp("bundle")
    if request.param in QUANTIZED:
        yield quantized(folder, request.param)[0]
        return
    path, _, _ = write(folder / "checkpoint", ModelConfig(**(SIZES | VARIANTS[request.param])))
    yield stem_edge.export_bundle(path, folder / "bundle", backbone="fp32", tables="fp32")


def test_graphs_are_valid_onnx_of_its_own_operators(bundle: Bundle) -> None:
    for name, source in variant_graphs(bundle, "portable").items():
        path = source.folder / f"{name}.onnx"
        path.write_bytes(source.data)
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load_model(str(path), load_external_data=False)
        assert {node.domain for node in model.graph.node} == {""}


FORMAT = BackboneFormat(weights="int4", head="int8", block_size=32)
ODD = BackboneFormat(weights="int4", head="int8", block_size=16, asymmetric=True)


def test_what_has_no_portable_graphs_says_why() -> None:
    plain, hashed = ModelConfig(**SIZES), ModelConfig(**(SIZES | HASHED))
    experts = make_layout(5, hashed.stem_layers, hashed.row_parts(), "int8", 16)
    assert "experts" in obstacle(hashed, experts, FORMAT)
    assert obstacle(plain, None, FORMAT) == ""
    # 48 inputs have three zero points in a row; the fourth place of the two bytes is unused.
    assert "--bits qkv=8" in obstacle(plain, None, ODD)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [({"dim": 64}, "down"), ({"dim": 64, "d_ff": 96, "row_rank": 48}, "project")],
)
def test_zero_points_of_other_matrices(fields: dict[str, Any], kind: str) -> None:
    config = ModelConfig(**(SIZES | fields))
    assert f"--bits {kind}=8" in obstacle(config, None, ODD)


def test_zero_points_that_can_be_read() -> None:
    even = ModelConfig(**(SIZES | {"dim": 64, "d_ff": 96}))
    bytes_of_each = BackboneFormat(weights="int8", head="int8", block_size=16, asymmetric=True)
    floats = BackboneFormat(weights="fp32", head="fp32", block_size=16, asymmetric=True)
    assert obstacle(even, None, ODD) == ""
    assert obstacle(ModelConfig(**SIZES), None, bytes_of_each) == ""
    assert obstacle(ModelConfig(**SIZES), None, floats) == ""
