"""Quantized bundles of every architecture, what is refused, and how another one is added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch_model
from architectures import SIZES, VARIANTS, Tensors, write
from tiers import slow_but
from torch import Tensor
from torch.nn import functional

import stem_edge
from stem_edge.config import ModelConfig
from stem_edge.layers import FFN_TERMS

TOLERANCE, MIXTURE = 1e-4, "mixture of rows"


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["stem", "stem-mix", "hash-moe", MIXTURE],
        ["stem", "stem-plus", "stem-mix", "stem-gate", "low rank", "hash-moe", "biases", MIXTURE],
    ),
)
@pytest.mark.parametrize(
    ("bits", "nats"), [pytest.param("int8", 2e-3, marks=pytest.mark.slow), ("int4", 0.3)]
)
def test_quantized_bundles_stay_close(name: str, bits: Any, nats: float, tmp_path: Path) -> None:
    config = ModelConfig(**(SIZES | VARIANTS[name]))
    path, _, _ = write(tmp_path / "checkpoint", config)
    out = stem_edge.export_bundle(path, tmp_path / "out", type=bits, rows=bits, prefill_graph=True)
    report = out.manifest.report
    assert report.divergence < nats
    assert report.prefill_divergence is not None and report.prefill_divergence < nats


def test_another_gated_ffn_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/architecture.md: from the checkpoint to the bundle, nothing else knows the kinds."""

    def ffn(config: ModelConfig, w: Tensors, x: Tensor, row: Tensor | None) -> Tensor:
        gate, up = functional.linear(x, w["gate"]), functional.linear(x, w["up"])
        return functional.linear(
            functional.silu(gate if row is None else gate + row) * up, w["down"]
        )

    monkeypatch.setattr(torch_model, "ffn", ffn)
    monkeypatch.setitem(FFN_TERMS, "new", {"gate": ("matrix", "row"), "up": ("matrix",)})
    path, ids, expected = write(
        tmp_path / "checkpoint", ModelConfig(**(SIZES | {"stem_ffn": "new"}))
    )
    out = stem_edge.export_bundle(path, tmp_path / "out", type="fp32", rows="fp32")
    with stem_edge.load(out.path) as model:  # no child process knows it
        assert np.abs(model.logits(ids) - expected).max() < TOLERANCE
