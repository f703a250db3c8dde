"""Heads of any width, padded to the width that kernels need."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from make_checkpoint import Shape, write_checkpoint

import stem_edge
from stem_edge.export.checkpoints.head_padding import HeadRows, pad_heads
from stem_edge.export.checkpoints.lingua import read_checkpoint
from stem_edge.numerics.matrix import ArrayMatrix, whole


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(4, 2), (2, 1), (2, 2), (1, 1)])
@pytest.mark.parametrize("dim", [16, 48, 80])
def test_heads_of_any_width(tmp_path: Path, heads: tuple[int, int], dim: int) -> None:
    shape = Shape(dim=dim, n_heads=heads[0], n_kv_heads=heads[1])
    path = write_checkpoint(tmp_path / "checkpoint", shape)
    bundle = stem_edge.export_bundle(path, tmp_path / "out", type="fp32", rows="fp32")
    assert bundle.manifest.report.worst_logit_difference < 1e-4


def test_heads_that_fit_are_left_alone(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", Shape(dim=64))
    checkpoint = read_checkpoint(path)
    matrices = {name: checkpoint.backbone[f"layers.0.{name}"] for name in ("wq", "wk", "wv", "wo")}
    assert pad_heads(checkpoint.config, 0, matrices) is matrices
    assert np.isfinite(whole(matrices["wo"])).all()


def test_any_rows_of_reordered_heads() -> None:
    matrix = np.arange(24 * 3, dtype=np.float32).reshape(24, 3)
    heads = HeadRows(ArrayMatrix(matrix), np.array([0, 3, 1, 4, 2, 5]))
    expected = heads.rows(0, 24)
    assert expected[:7, 0].tolist() == [0, 9, 3, 12, 6, 15, 18]
    for start, stop in ((0, 1), (5, 6), (5, 13), (6, 12), (23, 24)):
        assert np.array_equal(heads.rows(start, stop), expected[start:stop])
    vector = HeadRows(ArrayMatrix(matrix[:12, 0]), np.array([1, 0]))
    assert vector.rows(1, 3).tolist() == [0, 9]
