"""Every architecture: a checkpoint in, a bundle out, its logits those of an independent model.

The independent model is torch_model.py. In one pass, in chunks that fit few slots, and token by
token: all are below 1e-4 of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch_model
from conftest import add_ggml
from stem_format import save_stem
from test_conformance import stepwise
from torch import Tensor
from torch.nn import functional
from torch_model import expert_of_token, random_tables, random_tensors, torch_logits

import stem_edge
from stem_edge.config import (
    BIASED,
    FFN_TERMS,
    LinearRope,
    Llama3Rope,
    ModelConfig,
    YarnRope,
)
from stem_edge.errors import ExportError
from stem_edge.export.checkpoints.hf_config import tensor_name
from stem_edge.export.tokenizers.tokenizer import convert_tokenizer
from stem_edge.graph.formats import EngineName
from stem_edge.numerics.quantize import F32

TOLERANCE = 1e-4
Tensors = dict[str, Tensor]
SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "dim": 48,
    "n_layers": 3,
    "n_heads": 6,
    "n_kv_heads": 2,
    "head_dim": 8,
    "d_ff": 80,
    "stem_layers": (1, 2),
    "norm_eps": 1e-5,
    "rope_theta": 1e4,
    "max_context": 64,
}
HASHED: dict[str, Any] = {"stem_ffn": "hash-moe", "n_experts": 5}
VARIANTS: dict[str, dict[str, Any]] = {
    "stem": {},
    "all layers": {"stem_layers": (0, 1, 2)},
    "the first layer alone": {"stem_layers": (0,)},
    "dense": {"stem_layers": ()},
    "stem-plus": {"stem_ffn": "stem-plus"},
    "stem-gate": {"stem_ffn": "stem-gate"},
    "low rank": {"row_rank": 16},
    "low rank, plus": {"row_rank": 32, "stem_ffn": "stem-plus"},
    "low rank, gate": {"row_rank": 16, "stem_ffn": "stem-gate", "biases": ("up", "down")},
    "hash-moe": HASHED,
    "hash-moe, all layers, post norms": {**HASHED, "stem_layers": (0, 1, 2), "post_norms": True},
    "every head has its own keys": {"n_kv_heads": 6},
    "RoPE in halves": {"rope_interleaved": False, "head_dim": 24},
    "RoPE, linear": {"rope_scaling": LinearRope(2.0)},
    "RoPE, llama3": {"rope_scaling": Llama3Rope(8, 1, 4, 16)},
    "RoPE, yarn": {"rope_scaling": YarnRope(4, 16, 1.14), "rope_interleaved": False},
    "window": {"sliding_window": 5},
    "window of itself in one layer": {"sliding_window": 1, "window_layers": (1,)},
    "q and k norm": {"qk_norm_eps": 1e-2},
    "q and k norm, halves": {"qk_norm_eps": 1e-8, "rope_interleaved": False, "head_dim": 16},
    "biases": {"biases": BIASED},
    "q, k, v biases, halves": {"biases": ("wq", "wk", "wv"), "rope_interleaved": False},
    "a bias of q alone": {"biases": ("wq",)},
    "post norms": {"post_norms": True},
    "soft cap": {"logit_softcap": 3.0},
    "soft cap and head bias": {"logit_softcap": 3.0, "biases": ("head",)},
    "tied head": {"tied_head": True},
    "all at once": {
        "stem_ffn": "stem-plus",
        "row_rank": 16,
        "rope_interleaved": False,
        "rope_scaling": YarnRope(2, 16, 1.07, truncate=False),
        "sliding_window": 7,
        "window_layers": (0, 2),
        "qk_norm_eps": 1e-6,
        "biases": BIASED,
        "post_norms": True,
        "logit_softcap": 5.0,
    },
}


def write(folder: Path, config: ModelConfig, seed: int = 0) -> tuple[Path, list[int], F32]:
    """A checkpoint of random weights, some ids, and the logits [T, V] that it stands for."""
    tensors, rows = random_tensors(config, seed)
    stored = {tensor_name(name): tensor for name, tensor in tensors.items()}
    for layer, table in random_tables(config, seed).items():
        stored |= rows_as_tensors(config, f"model.layers.{layer}.mlp.", table)
    if config.n_experts:
        stored["model.expert_of_token"] = expert_of_token(config)
    save_stem(folder, config, stored, convert_tokenizer("bytes", None, add_bos=True))
    ids = np.random.default_rng(seed).integers(0, config.vocab_size, 40).tolist()
    return folder, ids, torch_logits(config, tensors, rows, ids).numpy()


def rows_as_tensors(config: ModelConfig, at: str, table: Tensor) -> Tensors:
    """A table, by the schema's names."""
    if not config.n_experts:
        return {at + "stem_table.weight": table}
    inner, outer = (math.prod(part) for part in config.row_parts())
    both = table[:, :inner].view(-1, config.d_ff, 2, config.dim)
    down = table[:, inner : inner + outer].view(-1, config.dim, config.d_ff)
    parts = {"gate": both[:, :, 0], "up": both[:, :, 1], "down": down}
    return {f"{at}experts.{name}_proj.weight": part for name, part in parts.items()}


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
    """With a backbone for each engine, over one table store."""
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
    "name", ["stem", "stem-plus", "stem-gate", "low rank", "hash-moe", "biases"]
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
