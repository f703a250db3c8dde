"""Checkpoints of random weights in the shapes of Gemma 4: real names and layers, here of small widths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gemma_checkpoint import PACKED, SHAPES, describe, write_gemma
from msgspec.structs import replace
from packed_folders import divergence
from transformers import AutoModelForCausalLM
from whole_model import forward

import stem_edge
from stem_edge.export.checkpoints.readers import read_checkpoint

SMALL: dict[str, Any] = {
    "vocab_size": 300, "vocab_size_per_layer_input": 300, "hidden_size": 32, "head_dim": 16,
    "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
    "hidden_size_per_layer_input": 16,
}  # fmt: skip
# Layers, those with keys and values of their own, and those with full attention.
EXPECTED = {
    "gemma-4-e2b": (35, 15, 7),
    "gemma-4-e4b": (42, 24, 7),
}


@pytest.mark.parametrize(
    "shape", [pytest.param(s, marks=pytest.mark.slow if n else ()) for n, s in enumerate(SHAPES)]
)
def test_a_checkpoint_runs(shape: str, tmp_path: Path) -> None:
    checkpoint = write_gemma(tmp_path / "checkpoint", describe(shape, **SMALL, global_head_dim=32))
    options: dict[str, Any] = {"type": "fp32", "rows": "fp16", "prefill_graph": False}
    stem_edge.export_bundle(checkpoint, tmp_path / "bundle", **options)
    with stem_edge.load(tmp_path / "bundle", context_length=64) as model:
        config = model.config
        full = sum(not config.window(layer) for layer in range(config.n_layers))
        assert (config.n_layers, config.own_kv_layers, full) == EXPECTED[shape]
        assert np.isfinite(model.logits([2, *range(4, 20)])).all()


@pytest.mark.slow
@pytest.mark.parametrize("shape", PACKED)
def test_a_packed_checkpoint_is_what_transformers_reads(shape: str, tmp_path: Path) -> None:
    sizes = SMALL | {"global_head_dim": 32}
    folder = write_gemma(tmp_path / "packed", describe(shape, packed=True, **sizes))
    source, ids = read_checkpoint(folder), [2, *range(4, 20)]
    parts = ("layers.14.up", "layers.15.up", "layers.2.ple_gate", "layers.2.wq", "embedding")
    matrices = [*(source.backbone[name] for name in parts), source.tables[0]]
    bits = [matrix.codes.bits for matrix in matrices if matrix.codes is not None]
    assert bits == [4, 2, 8, 4, 2, PACKED[shape]]
    assert source.config.tied_head
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, steps in model.named_parameters():
        if name.endswith("activation_scale"):
            steps.data.zero_()  # many layers of random weights make much of a float between two steps
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    config = replace(source.config, ranges={})
    found = forward(config, source.backbone, source.rows, ids)
    assert divergence(expected, found) < 1e-4
