"""Every architecture, from checkpoint to logits, compared with an independent model.

The independent model is torch_model.py. In one pass, in chunks that fit few slots, and token by
token: all are below 1e-4 of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch_model
from architectures import HASHED, SIZES, VARIANTS, Tensors, write
from conformance import stepwise
from installed import add_ggml
from tiers import slow_but
from torch import Tensor
from torch.nn import functional

import stem_edge
from stem_edge.config import ModelConfig
from stem_edge.errors import ExportError
from stem_edge.graph.formats import EngineName
from stem_edge.layers import FFN_TERMS
from stem_edge.numerics.quantize import F32

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=VARIANTS)
def variant(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[int], F32]:
    return write(
        tmp_path_factory.mktemp("variant") / "checkpoint",
        ModelConfig(**(SIZES | VARIANTS[request.param])),
    )


@pytest.fixture(scope="module")
def bundle(
    variant: tuple[Path, list[int], F32], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Export a backbone for each engine over one table store."""
    out = tmp_path_factory.mktemp("bundle") / "out"
    stem_edge.export_bundle(variant[0], out, backbone="fp32", tables="fp32")
    add_ggml(variant[0], out)
    yield out


def test_logits_in_one_pass(
    variant: tuple[Path, list[int], F32], bundle: Path, engine: EngineName
) -> None:
    _, ids, expected = variant
    with stem_edge.load(bundle, engine=engine) as model:
        assert np.abs(model.logits(ids) - expected).max() < TOLERANCE


@pytest.mark.slow
def test_logits_token_by_token(
    variant: tuple[Path, list[int], F32], bundle: Path, engine: EngineName
) -> None:
    _, ids, expected = variant
    with stem_edge.load(bundle, engine=engine) as model:
        assert np.abs(stepwise(model, ids) - expected).max() < TOLERANCE


@pytest.mark.slow
def test_logits_with_few_slots(
    variant: tuple[Path, list[int], F32], bundle: Path, engine: EngineName
) -> None:
    _, ids, expected = variant
    slots = 4 if stem_edge.open_bundle(bundle).manifest.tables else None
    with stem_edge.load(bundle, engine=engine, slots=slots) as model:
        assert np.abs(model.logits(ids) - expected).max() < TOLERANCE


@pytest.mark.parametrize(
    "name",
    slow_but(
        ["stem", "hash-moe"], ["stem", "stem-plus", "stem-gate", "low rank", "hash-moe", "biases"]
    ),
)
@pytest.mark.parametrize(("bits", "nats"), [("int8", 2e-3), ("int4", 0.3)])
def test_quantized_bundles_stay_close(name: str, bits: Any, nats: float, tmp_path: Path) -> None:
    config = ModelConfig(**(SIZES | VARIANTS[name]))
    path, _, _ = write(tmp_path / "checkpoint", config)
    out = stem_edge.export_bundle(
        path, tmp_path / "out", backbone=bits, tables=bits, prefill_graph=True
    )
    report = out.manifest.report
    assert report.divergence < nats
    assert report.prefill_divergence is not None and report.prefill_divergence < nats


def test_experts_of_16_bits_are_refused(tmp_path: Path) -> None:
    path, _, _ = write(tmp_path / "checkpoint", ModelConfig(**(SIZES | HASHED)))
    with pytest.raises(ExportError, match="experts"):
        stem_edge.export_bundle(path, tmp_path / "out", tables="fp16")


def test_another_gated_ffn_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/models.md, "Add a model": from the checkpoint to the bundle, nothing else knows the kinds."""

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
    out = stem_edge.export_bundle(path, tmp_path / "out", backbone="fp32", tables="fp32")
    with stem_edge.load(out.path, trial=False) as model:  # no child process knows it
        assert np.abs(model.logits(ids) - expected).max() < TOLERANCE
