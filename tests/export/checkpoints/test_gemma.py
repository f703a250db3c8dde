"""Gemma 4's text models, alone and inside multimodal ones: read, and refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_folders import edit, edit_tensors, make_gemma, refused, wrap_gemma
from installed import DATA
from safetensors.torch import save_file

from stem_edge.export.checkpoints.checkpoint import Checkpoint
from stem_edge.export.checkpoints.lora import merge_lora
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.reference import forward

CONFORMANCE = DATA / "conformance"
IDS = np.random.default_rng(1).integers(90, size=40).tolist()
# Changes to a small model of six layers: three have full attention, and two borrow K and V.
KINDS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "nobody borrows": {"num_kv_shared_layers": 0},
    "wide FFN where K and V are borrowed": {"use_double_wide_mlp": True},
    "no per-layer embeddings": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    "fewer rows than ids": {"vocab_size_per_layer_input": 90},
    "K is V": {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0},
    "no cap": {"final_logit_softcapping": None},
    "all turn": {"rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
    }},
    "head of its own": {"tie_word_embeddings": False},
    "odd heads": {"head_dim": 12, "global_head_dim": 20},
}  # fmt: skip


def logits(checkpoint: Checkpoint, ids: list[int]) -> F32:
    return forward(checkpoint.config, checkpoint.backbone, checkpoint.rows, ids)


@pytest.mark.parametrize("name", ["gemma4-text", "gemma4-wide"])
def test_logits_are_the_trainers(name: str) -> None:
    with np.load(CONFORMANCE / name / "reference.npz") as data:
        found = logits(read_checkpoint(CONFORMANCE / name), data["ids"].tolist())
        assert np.abs(found - data["logits"]).max() < 5e-4


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_every_kind_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = make_gemma(**KINDS[kind])
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    found = logits(read_checkpoint(tmp_path), IDS)
    assert np.abs(found - expected).max() < 5e-4
    assert np.abs(expected).max() > 1


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CONFORMANCE / "gemma4-text", tmp_path / "gemma"))


def test_factors_are_rounded_as_the_weights_are(gemma: Path) -> None:
    assert read_checkpoint(gemma).config.embedding_scale == 8
    edit(gemma, dtype="bfloat16", hidden_size_per_layer_input=32)
    assert read_checkpoint(gemma).config.ple_scale == 5.65625  # of 5.656854


def test_the_text_model_of_a_multimodal_one(gemma: Path) -> None:
    alone = read_checkpoint(gemma)
    wrap_gemma(gemma, image_token_id=300, boi_token_id=301)
    found = read_checkpoint(gemma)
    assert found.config.placeholders == {"an image": 300}  # others are beyond this vocabulary
    assert "only the text model is exported" in " ".join(found.notes)
    assert (logits(found, IDS) == logits(alone, IDS)).all()


def test_an_adapter_of_keys_that_are_values_changes_both(tmp_path: Path) -> None:
    model = make_gemma(**KINDS["K is V"])
    model.save_pretrained(tmp_path / "model")
    keys = model.model.layers[1].self_attn.k_proj.weight  # of a layer of full attention
    left, right = torch.ones(keys.shape[0], 2), torch.full((2, keys.shape[1]), 0.05)
    module = "base_model.model.model.layers.1.self_attn.k_proj.lora_"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    tensors = {f"{module}A.weight": right, f"{module}B.weight": left}
    save_file(tensors, adapter / "adapter_model.safetensors")
    options = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["k_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(options))
    with torch.no_grad():
        keys += left @ right
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    merged = merge_lora(read_checkpoint(tmp_path / "model"), adapter)
    assert np.abs(logits(merged, IDS) - expected).max() < 5e-4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"enable_moe_block": True}, "enable_moe_block is True"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_parameters": {"sliding_attention": {}}}, "expected full_attention in it"),
        ({"per_layer_config": {"1": {"d_ff": 3}}}, "expected layers with head_dim"),
        ({"per_layer_config": {"x": {"head_dim": 8}}}, "expected layers with head_dim"),
        ({"per_layer_config": {str(n): {"head_dim": 2 * n + 2} for n in range(7)}}, "layer_kinds"),
        ({"per_layer_config": {"9": {"head_dim": 8}}}, "outside the 7 layers"),
        ({"num_kv_shared_layers": 6}, "no layer before it has its kind"),
        ({"num_kv_shared_layers": 7}, "borrowed_kv_layers is 7 of 7"),
        ({"hidden_size_per_layer_input": -256}, "math domain error"),
        ({"dtype": None}, "no dtype"),
        ({"inside": "foo."}, "inside is 'foo.'; expected no such key"),
        ({"hidden_size_per_layer_input": 16}, "[307, 224]; expected [307, 112]"),
        ({"vocab_size_per_layer_input": 308}, "ple_records is 308 of 307"),
        ({"intermediate_size": 100}, "gate is [96, 64], expected [100, 64]"),
        ({"altup_num_inputs": 4}, "altup_num_inputs is 4; expected no such key"),
    ],
)
def test_what_is_refused(gemma: Path, changes: dict[str, Any], words: str) -> None:
    edit(gemma, **changes)
    refused(gemma, words)


def test_tensors_that_are_missing_or_too_many(gemma: Path) -> None:
    edit_tensors(gemma, lambda tensors: tensors.pop("model.embed_tokens_per_layer.weight"))
    refused(gemma, "no tensor model.embed_tokens_per_layer.weight")


def test_keys_and_values_that_nobody_reads_may_be_there(gemma: Path) -> None:
    """Read what transformers reads, which does not load them, either."""
    name = "model.layers.{}.self_attn.k_proj.weight"
    edit_tensors(gemma, lambda tensors: tensors.update({name.format(6): torch.ones(2)}))
    read_checkpoint(gemma)
    edit_tensors(gemma, lambda tensors: tensors.update({name.format(7): torch.ones(2)}))
    refused(gemma, "tensor model.layers.7.self_attn.k_proj.weight is not part of the model")
