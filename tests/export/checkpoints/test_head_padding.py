"""Heads of any width, padded to the width that kernels need."""

from __future__ import annotations

from pathlib import Path

import pytest
from make_checkpoint import Shape, write_checkpoint

import stem_edge


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(4, 2), (2, 1), (2, 2), (1, 1)])
@pytest.mark.parametrize("dim", [16, 48, 80])
def test_heads_of_any_width(tmp_path: Path, heads: tuple[int, int], dim: int) -> None:
    shape = Shape(dim=dim, n_heads=heads[0], n_kv_heads=heads[1])
    path = write_checkpoint(tmp_path / "checkpoint", shape)
    bundle = stem_edge.export_bundle(path, tmp_path / "out", type="fp32", rows="fp32")
    assert bundle.manifest.report.divergence < 1e-7
