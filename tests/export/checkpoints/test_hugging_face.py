"""Models of the transformers library: supported ones, and options that are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_folders import (
    EVERY_SECOND,
    MODELS,
    YARN,
    check_logits,
    edit,
    edit_tensors,
    make_model,
    refused,
)

from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.hugging_face.reader import read_checkpoint


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    ids = np.random.default_rng(1).integers(97, size=60).tolist()  # past the original context
    check_logits(make_model(name), tmp_path, ids, 1e-4)


BEYOND = {"model.layers.3.mlp.up_proj.weight": torch.ones(2)}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    make_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def llama(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "llama"))


def config_of(folder: Path, **values: Any) -> ModelConfig:
    edit(folder, **values)
    return read_checkpoint(folder).config


def test_the_description_of_a_model(llama: Path) -> None:
    assert config_of(llama, rope_parameters={"rope_theta": 5e5}) == ModelConfig(
        vocab_size=97, dim=32, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=48,
        stem_layers=(), norm_eps=1e-6, rope_theta=5e5, rope_interleaved=False, max_context=64,
    )  # fmt: skip


def add_biases(tensors: dict[str, torch.Tensor]) -> None:
    for layer in range(3):
        for name, size in (("q", 32), ("k", 16), ("v", 16)):
            tensors[f"model.layers.{layer}.self_attn.{name}_proj.bias"] = torch.ones(size)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"model_type": "mixtral"}, ["model_type is 'mixtral'", "llama, mistral, qwen2, qwen3"]),
        ({"model_type": "smollm3"}, ["model_type is 'smollm3'"]),
        ({"model_type": None}, ["model_type is None"]),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "expected 'silu'"]),
        (
            {"quantization_config": {"quant_method": "compressed-tensors"}},
            ["already quantized (compressed-tensors); export the original"],
        ),
        ({"quantization": {"group_size": 64, "bits": 4}}, ["already quantized (mlx)"]),
        ({"quantization_config": {"group_size": 64, "bits": 4}}, ["already quantized (mlx)"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor is 0.5", "expected 1"]),
        ({"chunk_size_feed_forward": 2}, ["chunk_size_feed_forward is 2, expected 0"]),
        ({"model_type": "mistral", "layer_types": EVERY_SECOND}, ["layer_types"]),
        (
            {"sliding_window": 5, "is_causal": False},
            [
                "sliding_window is 5",
                "is_causal is False, expected True: may change what llama models",
                "delete it from the file",
            ],
        ),
        ({"num_hidden_layers": 10**12}, ["num_hidden_layers"]),
        ({"num_attention_heads": 0}, [">= 1 - at `$.num_attention_heads"]),
        ({"num_key_value_heads": 3}, ["not a multiple of n_kv_heads 3"]),
        ({"vocab_size": "97"}, ["vocab_size"]),
        ({"rms_norm_eps": 0}, ["norm_eps 0"]),
        ({"head_dim": 7}, ["head_dim 7 is odd"]),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2}}, ["'dynamic'", "llama3, yarn"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["'longrope'"]),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, ["['yarn']"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["linear", "factor"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0.1}}, ["factor", "0.1"]),
        ({"rope_parameters": {"factor": 2.0}}, ["default", "factor"]),
        ({"rope_parameters": {"full_attention": {}}}, ["full_attention"]),
        ({"rope_parameters": YARN | {"finetuned": True}}, ["yarn", "finetuned"]),
        ({"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ({"rope_parameters": {"rope_type": "yarn"}, "max_position_embeddings": 0}, []),
        ({"rope_scaling": YARN}, ["both rope_scaling and rope_parameters"]),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, ["layer_types", "3 layers"]),
        ({"model_type": "qwen3", "layer_types": EVERY_SECOND}, ["no sliding_window is set"]),
    ],
)
def test_a_config_that_is_not_understood(
    llama: Path, values: dict[str, Any], parts: list[str]
) -> None:
    edit(llama, **values)
    refused(llama, "config.json", *parts)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "no tensor model.norm.weight"),
        (lambda tensors: tensors.update(BEYOND), f"tensor {next(iter(BEYOND))} is not part of the"),
        (lambda tensors: tensors.update({"score.weight": torch.ones(2)}), "tensor score.weight is"),
        (add_biases, "self_attn.k_proj.bias"),
    ],
)
def test_tensors_that_are_not_those_of_the_model(llama: Path, change: Any, said: str) -> None:
    edit_tensors(llama, change)
    refused(llama, said)


def test_a_tied_head_saved_twice(llama: Path) -> None:
    edit(llama, tie_word_embeddings=True)
    refused(llama, "lm_head.weight differs from the embedding")
    edit_tensors(llama, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 0}))
    assert "head" not in read_checkpoint(llama).backbone
