"""Predicted sizes of bundles, compared with the sizes of real ones."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from installed import DEMO

from stem_edge.bundle.expected import expected_footprint
from stem_edge.bundle.footprint import footprint_of, matrix_nbytes
from stem_edge.bundle.manifest import Manifest
from stem_edge.bundle.opening import open_bundle
from stem_edge.graph.formats import BackboneFormat
from stem_edge.graph.layer import backbone_shapes
from stem_edge.numerics.quantize import fitting_block
from stem_edge.special import dense_twin


@pytest.fixture(params=["demo", "tiny"])
def manifest(request: pytest.FixtureRequest, tiny_bundle: Path) -> Manifest:
    return open_bundle(DEMO if request.param == "demo" else tiny_bundle).manifest


def test_what_an_export_will_take_is_known_before(manifest: Manifest) -> None:
    found = footprint_of(manifest)
    assert manifest.backbone is not None
    expected = expected_footprint(manifest.backbone, manifest.model, manifest.table_format)
    assert expected == found


def test_a_step_reads_all_weights_but_the_embedding(manifest: Manifest) -> None:
    found, model, format = footprint_of(manifest), manifest.model, manifest.backbone
    assert format is not None
    stored = (format.type_of("embedding"), fitting_block(model.dim, format.block_size))
    embedding = matrix_nbytes(model.vocab_size, model.dim, *stored, zero_points=True)
    assert found.step_nbytes == found.backbone_nbytes - embedding
    assert found.flash_nbytes > found.step_nbytes


def test_matrices() -> None:
    assert matrix_nbytes(10, 256, "fp32", 128) == 10 * 256 * 4
    assert matrix_nbytes(10, 256, "int8", 128) == 10 * 256 + 10 * 2 * 4
    assert matrix_nbytes(10, 256, "int4", 64) == 10 * 128 + 10 * 4 * 4
    assert matrix_nbytes(10, 256, "int4", 64, zero_points=True) == 10 * 128 + 10 * 4 * 4 + 10 * 2


def test_a_dense_model_and_one_without_a_prefill_graph(manifest: Manifest) -> None:
    config = dense_twin(manifest.model)
    plain = BackboneFormat(weights="fp32", head="fp32", block_size=128)
    found = expected_footprint(plain, config, None)
    assert (found.tables_nbytes, found.prefill_nbytes) == (0, 0)
    stored = sum(map(math.prod, backbone_shapes(config).values()))  # narrow heads are padded
    assert 0 <= found.backbone_nbytes - 4 * stored < 64 * 20 * config.n_layers  # and all aligned
    width = -(-config.head_dim // 16) * 16
    assert found.kv_nbytes(10) == 2 * config.n_layers * config.n_kv_heads * width * 4 * 10
