"""Checkpoints in this project's schema: written by tools/stem_format.py, read, and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from architectures import schema_tensors
from hf_folders import edit, refused
from models import ENGRAM
from safetensors.torch import load_file, save_file
from stem_format import save_stem
from torch import Tensor
from torch_model import random_tensors, torch_logits
from whole_model import forward

from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.hugging_face.reader import read_checkpoint
from stem_edge.layers import BIASED, LinearRope, Llama3Rope, YarnRope

SIZES: dict[str, Any] = {
    "vocab_size": 61, "dim": 40, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8,
    "d_ff": 96, "norm_eps": 1e-5, "rope_theta": 1e4, "max_context": 64,
}  # fmt: skip
LLAMA3 = Llama3Rope(8.0, 1.0, 4.0, 16)
YARN = YarnRope(4.0, 32, 1.2, beta_fast=4.0, beta_slow=0.2, truncate=False)
VARIANTS: list[dict[str, Any]] = [
    {"stem_layers": (1,)}, {"stem_layers": (0, 1, 2)}, {"stem_layers": (0, 2), "row_rank": 16},
    {"stem_layers": (2,), "stem_ffn": "stem-plus"},
    {"stem_layers": (1, 2), "stem_ffn": "stem-plus", "row_rank": 16},
    {"stem_layers": (0, 1), "stem_ffn": "stem-mix"},
    {"stem_layers": (0, 1), "row_window": 4}, {"stem_layers": (0, 2), "row_experts": 3},
    {"stem_layers": (0, 1), "stem_ffn": "stem-gate"},
    {"stem_layers": (1,), "stem_ffn": "stem-gate", "row_rank": 16},
    {"stem_layers": (1,), "stem_ffn": "hash-moe", "n_experts": 5},
    {"stem_layers": (0, 2), "stem_ffn": "hash-moe", "n_experts": 61}, {"stem_layers": ()},
    {"stem_layers": (1,), "head_dim": 24, "n_kv_heads": 1, "rope_interleaved": False},
    {"stem_layers": (1,), "n_kv_heads": 4, "tied_head": True, "rope_theta": 500.0},
    {"stem_layers": (1,), "rope_scaling": LinearRope(4.0)},
    {"stem_layers": (1,), "rope_scaling": LLAMA3},
    {"stem_layers": (1,), "rope_scaling": YARN, "head_dim": 24},
    {"stem_layers": (1,), "sliding_window": 5},
    {"stem_layers": (1,), "sliding_window": 5, "window_layers": (0, 2)},
    {"stem_layers": (1,), "qk_norm_eps": 1e-8, "post_norms": True},
    {"stem_layers": (1,), "biases": BIASED, "logit_softcap": 3.0},
    {"stem_layers": (0,), "stem_ffn": "stem-gate", "biases": ("gate", "wo")},
]  # fmt: skip


# Fields that no option of the schema sets, because only checkpoints of Gemma have them.
GEMMA = {
    "layer_kinds", "borrowed_kv_layers", "embedding_scale", "activation", "attention_scale",
    "v_norm", "layer_scale", "ple_width", "ple_scale", "ple_records", "placeholders",
    "streams", "active_stream", "ple_gate_scale", "laurel_rank",
    "ranges",
}  # fmt: skip


def save(folder: Path, **fields: Any) -> ModelConfig:
    config = ModelConfig(**(SIZES | {"stem_layers": (1,)} | fields))
    save_stem(folder, config, schema_tensors(config))
    return config


def logits(folder: Path, ids: list[int]) -> np.ndarray[Any, Any]:
    found = read_checkpoint(folder)
    return forward(found.config, found.backbone, found.rows, ids)


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_logits_of_every_variant(tmp_path: Path, fields: dict[str, Any]) -> None:
    config = save(tmp_path, **fields)
    assert read_checkpoint(tmp_path).config == config
    ids = np.random.default_rng(1).integers(61, size=40).tolist()
    expected = torch_logits(config, *random_tensors(config, 0), ids).numpy()
    found = logits(tmp_path, ids)
    assert np.abs(found - expected).max() < 1e-4


def test_a_config_written_by_hand(tmp_path: Path) -> None:
    config = save(tmp_path)
    by_hand = {
        "model_type": "stem", "vocab_size": 61, "hidden_size": 40, "intermediate_size": 96,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_interleave": True,
        "stem_layers": [1],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(by_hand))
    assert read_checkpoint(tmp_path).config == config
    assert set(load_file(tmp_path / "model.safetensors")) == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.1.mlp.stem_table.weight",
        *(f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 2)),
        *(f"model.layers.{n}.self_attn.{x}_proj.weight" for n in range(3) for x in "qkvo"),
        *(f"model.layers.{n}.mlp.{x}_proj.weight" for n in range(3) for x in ("gate", "down")),
        *(f"model.layers.{n}.input_layernorm.weight" for n in range(3)),
        *(f"model.layers.{n}.post_attention_layernorm.weight" for n in range(3)),
    }


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"stem_layers": [3]}, ["(3,) is outside the 3 layers"]),
        ({"stem_layers": [1, 1]}, ["(1, 1)"]),
        ({"stem_layers": [2]}, ["no tensor model.layers.1.mlp.up_proj.weight"]),
        ({"stem_ffn": "stem-minus"}, ["stem-minus", "stem_ffn"]),
        ({"stem_ffn": "stem-gate"}, ["no tensor model.layers.1.mlp.up_proj.weight"]),
        ({"stem_ffn": "stem-mix"}, ["no tensor model.layers.1.mlp.up_proj.weight"]),
        ({"stem_rank": 16}, ["no tensor model.layers.1.mlp.stem_project.weight"]),
        ({"stem_rank": 97}, ["row_rank is 97"]),
        ({"stem_window": 300}, ["row_window is 300", "expected 2 to 256"]),
        ({"stem_experts": 3}, ["no tensor model.layers.1.mlp.stem_router.weight"]),
        ({"stem_experts": 1}, ["row_experts is 1", "expected 2 to 64"]),
        ({"stem_experts": 65}, ["row_experts is 65", "expected 2 to 64"]),
        ({"num_experts": 4}, ["n_experts is 4 with stem_ffn stem"]),
        ({"stem_table_dtype": "int8"}, ["stem_table_dtype is 'int8'", "stem models"]),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "expected 'silu'"]),
        ({"attention_bias": True}, ["attention_bias is True"]),
        ({"biases": ["q"]}, ["'q'", "q_proj", "lm_head"]),
        ({"biases": ["q_proj"]}, ["no tensor model.layers.0.self_attn.q_proj.bias"]),
        ({"layer_types": ["sliding_attention"] * 3}, ["no sliding_window"]),
        ({"final_logit_softcapping": -1}, ["-1"]),
    ],
)
def test_a_config_that_is_not_understood(
    tmp_path: Path, values: dict[str, Any], parts: list[str]
) -> None:
    save(tmp_path)
    edit(tmp_path, **values)
    refused(tmp_path, *parts)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda index: index.float(), ["is F32", "expected one of I32, I64"]),
        (lambda index: index[:-1], ["is [60]", "expected [61]"]),
        (lambda index: index + 1, ["values 1 to 5", "expected 0 to 4"]),
        (lambda index: index - 1, ["values -1 to 3"]),
        (lambda index: index + (1 << 40), ["values 1099511627776 to"]),
    ],
)
def test_a_map_of_tokens_that_does_not_fit(
    tmp_path: Path, change: Callable[[Tensor], Tensor], parts: list[str]
) -> None:
    save(tmp_path, stem_ffn="hash-moe", n_experts=5)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.expert_of_token"] = change(tensors["model.expert_of_token"])
    save_file(tensors, path)
    refused(tmp_path, "model.expert_of_token", *parts)


ROUTER, TABLE = (f"model.layers.1.mlp.stem_{name}.weight" for name in ("router", "table"))
Tensors = dict[str, Tensor]


@pytest.mark.parametrize(
    ("fields", "change", "parts"),
    [
        ({"row_experts": 3}, lambda t: {ROUTER: t[ROUTER][:2]}, ["layers.1.router is [2, 40], expected [3, 40]"]),
        ({"row_experts": 3}, lambda t: {TABLE: t[TABLE][:, :96]}, [TABLE, "[61, 96]", "[61, 288]"]),
        ({}, lambda t: {ROUTER: torch.ones(3, 40)}, [ROUTER]),
        ({"row_experts": 3}, lambda t: {ROUTER.replace("1", "0"): t[ROUTER]}, ["layers.0", "router"]),
    ],
)  # fmt: skip
def test_a_router_or_rows_that_do_not_fit(
    tmp_path: Path, fields: dict[str, Any], change: Callable[[Tensors], Tensors], parts: list[str]
) -> None:
    save(tmp_path, **fields)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {name: t.clone() for name, t in change(tensors).items()}, path)
    refused(tmp_path, *parts)


def test_every_option_of_a_model_is_in_a_variant() -> None:
    """A new field of ModelConfig must find its place in the schema."""
    tried = {name for fields in VARIANTS for name in SIZES | fields}
    tried |= ENGRAM.keys()
    not_in_schema = {"bos_id", "eos_ids"} | GEMMA  # the first two are the tokenizer's
    assert {f.name for f in msgspec.structs.fields(ModelConfig)} - not_in_schema == tried
