"""Predicted sizes of bundles, compared with the sizes of real ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from installed import DEMO

from stem_edge.bundle.footprint import footprint_of, matrix_nbytes
from stem_edge.bundle.manifest import Manifest
from stem_edge.bundle.opening import open_bundle
from stem_edge.numerics.quantize import fitting_block


@pytest.fixture(params=["demo", "tiny"])
def manifest(request: pytest.FixtureRequest, tiny_bundle: Path) -> Manifest:
    return open_bundle(DEMO if request.param == "demo" else tiny_bundle).manifest


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
