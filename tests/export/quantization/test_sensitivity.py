"""Costs of 4 bits in each part of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hf_folders import make_gemma, make_gemma3n, written
from whole_model import forward

from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.export.quantization.sensitivity import costs
from stem_edge.numerics.distributions import divergence
from stem_edge.numerics.matrix import ArrayMatrix, whole
from stem_edge.numerics.quantizing import dequantize_blocks, quantize_asymmetric

IDS, BLOCK = [5, 9, 20, 5, 31, 7, 11, 12], 16
MATRICES = ("wq", "wk", "wv", "wo", "gate", "up", "down")


@pytest.mark.parametrize("make", [make_gemma, make_gemma3n])
def test_a_layer_costs_what_the_model_loses(make: Callable[[], Any], tmp_path: Path) -> None:
    """Also what later layers lose that read its keys and values; whatever the threads."""
    source = read_checkpoint(written(make(), tmp_path))
    found = costs(source, IDS, BLOCK)
    assert found == costs(source, IDS, BLOCK, threads=4)
    exact = forward(source.config, source.backbone, source.rows, IDS)
    for at in (f"layers.{layer}." for layer in range(source.config.n_layers)):
        backbone = dict[str, Any](source.backbone)
        for name in (at + part for part in MATRICES if at + part in backbone):
            blocks = quantize_asymmetric(whole(backbone[name]), 4, BLOCK)
            stored = dequantize_blocks(blocks.codes, blocks.scales, 4, blocks.zero_points)
            backbone[name] = ArrayMatrix(stored)
        lost = divergence(exact, forward(source.config, backbone, source.rows, IDS)).mean()
        own = sum(cost.nats for name, cost in found.items() if name.startswith(at))
        assert own == pytest.approx(float(lost), rel=1e-3)
