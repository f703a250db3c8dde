"""Gemma 4's text models, alone and inside multimodal ones: read, and refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_folders import check_logits, edit, edit_tensors, logits, make_gemma, refused, wrap_gemma
from installed import DATA
from safetensors.torch import save_file
from tiers import slow_but
from torch import Tensor

from stem_edge.export.checkpoints.lora import merge_lora
from stem_edge.export.checkpoints.readers import read_checkpoint

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


@pytest.mark.parametrize(
    "kind", slow_but(["as it is", "fewer rows than ids", "K is V", "odd heads"], KINDS)
)
def test_logits_of_every_kind_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    check_logits(make_gemma(**KINDS[kind]), tmp_path, IDS)


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CONFORMANCE / "gemma4-text", tmp_path / "gemma"))


def test_the_text_model_of_a_multimodal_one(gemma: Path) -> None:
    alone = read_checkpoint(gemma)
    wrap_gemma(gemma, image_token_id=300, boi_token_id=301, audio_token_index=5)
    found = read_checkpoint(gemma)
    assert (
        "ignored what transformers does not know in gemma4 models: audio_token_index"
        in found.notes[0]
    )
    assert found.config.placeholders == {"an image": 300}  # others are beyond this vocabulary
    assert "only the text model is exported" in " ".join(found.notes)
    assert (logits(found, IDS) == logits(alone, IDS)).all()


def write_adapter(folder: Path, module: str, left: Tensor, right: Tensor) -> Path:
    """Write an adapter that adds left @ right to a module."""
    folder.mkdir()
    name = f"base_model.model.model.{module}.lora_"
    tensors = {f"{name}A.weight": right, f"{name}B.weight": left}
    save_file(tensors, folder / "adapter_model.safetensors")
    options = {"peft_type": "LORA", "r": len(right), "lora_alpha": len(right)}
    (folder / "adapter_config.json").write_text(json.dumps(options))
    return folder


def test_an_adapter_of_keys_that_are_values_changes_both(tmp_path: Path) -> None:
    model = make_gemma(**KINDS["K is V"])
    model.save_pretrained(tmp_path / "model")
    keys = model.model.layers[1].self_attn.k_proj.weight  # of a layer of full attention
    left, right = torch.ones(keys.shape[0], 2), torch.full((2, keys.shape[1]), 0.05)
    adapter = write_adapter(tmp_path / "adapter", "layers.1.self_attn.k_proj", left, right)
    with torch.no_grad():
        keys += left @ right
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    merged = merge_lora(read_checkpoint(tmp_path / "model"), adapter)
    assert np.abs(logits(merged, IDS) - expected).max() < 5e-4


def test_ids_beyond_the_table_have_its_first_row(tmp_path: Path) -> None:
    model = make_gemma(**KINDS["fewer rows than ids"])
    model.save_pretrained(tmp_path)
    short = read_checkpoint(tmp_path)
    table = "model.embed_tokens_per_layer.weight"
    edit(tmp_path, vocab_size_per_layer_input=97)
    edit_tensors(tmp_path, lambda t: t.update({table: torch.cat([t[table], t[table][[0] * 7]])}))
    ids = [3, 89, 90, 96, 5]
    assert (logits(short, ids) == logits(read_checkpoint(tmp_path), ids)).all()


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
        ({"hidden_size_per_layer_input": 16}, "[224, 64]; expected [112, 64]"),
        ({"vocab_size_per_layer_input": 308}, "ple_records is 308 of 307"),
        ({"intermediate_size": 100}, "gate is [96, 64], expected [100, 64]"),
        ({"num_experts": 4}, "num_experts is 4, expected None"),
        ({"hidden_size_per_layer_input": 0}, "embed_tokens_per_layer.weight is not part"),
        ({"vocab_size_per_layer_input": 200}, "[307, 224]; expected [200, 224]"),
        ({"vocab_size": 400}, "embedding is [307, 64], expected [400, 64]"),
        ({"num_hidden_layers": 8}, "expected full_attention or sliding_attention for each of 8"),
        ({"head_dim": 24}, "layers.0.wq is [64, 64], expected [96, 64]"),
        ({"num_kv_shared_layers": 1}, "no tensor model.layers.4.self_attn.k_proj.weight"),
        ({"use_double_wide_mlp": False}, "layers.4.gate is [192, 64], expected [96, 64]"),
        ({"tie_word_embeddings": False}, "no tensor lm_head.weight"),
        ({"attention_k_eq_v": True}, "layers.2.self_attn.v_proj.weight is not part"),
    ],
)
def test_what_is_refused(gemma: Path, changes: dict[str, Any], words: str) -> None:
    edit(gemma, **changes)
    refused(gemma, words)


Tensors = dict[str, Tensor]


def cut(name: str, rows: int | None = None, columns: int | None = None) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: tensors[name][:rows, :columns].clone()})


def without(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


PLE_TABLE = "model.embed_tokens_per_layer.weight"
PLE_CONTEXT = "model.per_layer_model_projection.weight"
PLE_GATE = "model.layers.3.per_layer_input_gate.weight"
SCALE = "model.layers.3.layer_scalar"
DAMAGED: list[tuple[Callable[[Tensors], Any], str]] = [
    (without(PLE_TABLE), f"no tensor {PLE_TABLE}"),
    (without(PLE_CONTEXT), f"no tensor {PLE_CONTEXT}"),
    (without(PLE_GATE), f"no tensor {PLE_GATE}"),
    (without(SCALE), f"no tensor {SCALE}"),
    (cut(PLE_TABLE, rows=306), f"{PLE_TABLE} is [306, 224]; expected [307, 224]"),
    (cut(PLE_TABLE, columns=192), f"{PLE_TABLE} is [307, 192]; expected [307, 224]"),
    (cut(PLE_CONTEXT, rows=192), f"{PLE_CONTEXT} is [192, 64]; expected [224, 64]"),
    (lambda t: t.update({PLE_CONTEXT: torch.ones(256, 64)}), "is [256, 64]; expected [224, 64]"),
    (cut(PLE_CONTEXT, columns=63), f"{PLE_CONTEXT} is [224, 63]; expected [224, 64]"),
    (cut(PLE_GATE, rows=31), "layers.3.ple_gate is [31, 64], expected [32, 64]"),
    (lambda t: t.update({SCALE: torch.ones(2)}), "layers.3.layer_scale is [2], expected [1]"),
    (lambda t: t.update({PLE_TABLE: t[PLE_TABLE].to(torch.int8)}), f"{PLE_TABLE} is I8; expected"),
    (lambda t: t.update({"model.layers.3.altup": torch.ones(2)}), "layers.3.altup is not part"),
]


@pytest.mark.parametrize(("change", "words"), DAMAGED, ids=[words for _, words in DAMAGED])
def test_tensors_that_are_missing_or_differ(
    gemma: Path, change: Callable[[Tensors], Any], words: str
) -> None:
    edit_tensors(gemma, change)
    refused(gemma, words)
