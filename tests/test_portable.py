"""Portable graphs: ONNX's own operators alone, over the very bytes of the graphs they come from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from test_architectures import HASHED, SIZES, VARIANTS, write

import stem_edge
from stem_edge.bundle.manifest import Bundle
from stem_edge.config import ModelConfig
from stem_edge.graph.formats import BackboneFormat
from stem_edge.graph.portable import obstacle
from stem_edge.runtime.backends.onnxruntime.providers.graphs import variant_graphs
from stem_edge.tables.rows import make_layout

KINDS = [name for name, fields in VARIANTS.items() if "n_experts" not in fields]
# Of these, those whose graphs have nodes that no other's have.
DISTINCT = ["stem", "dense", "stem-plus", "low rank, gate", "q and k norm, halves", "all at once"]
Quantized = tuple[dict[str, Any], dict[str, Any]]  # of the model, of the export
QUANTIZED: dict[str, Quantized] = {
    "int4": ({}, {"backbone": "int4", "tables": "int4"}),
    "int8": ({}, {"backbone": "int8", "tables": "int8"}),
    "int4 with zero points": (
        {"dim": 64, "d_ff": 64},
        {"backbone": "int4", "tables": "fp16", "asymmetric": True},
    ),
    "int8 with zero points": ({}, {"backbone": "int8", "tables": "int8", "asymmetric": True}),
    "low rank": ({"row_rank": 32}, {"backbone": "int4", "tables": "int8"}),
    "tied, normed heads": (
        {"tied_head": True, "qk_norm_eps": 1e-5},
        {"backbone": "int4", "tables": "int4"},
    ),
}


def quantized(folder: Path, name: str) -> tuple[Bundle, list[int]]:
    """A bundle with a quantized backbone, and some ids."""
    fields, options = QUANTIZED[name]
    path, ids, _ = write(folder / "checkpoint", ModelConfig(**(SIZES | fields)))
    out = folder / "bundle"
    return stem_edge.export_bundle(path, out, block_size=16, prefill_graph=False, **options), ids


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
    # Three zero points in a row, of a matrix with 48 inputs; two bytes hold them, and one of nobody.
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
