"""Detection of a checkpoint's trainer, and what every reader must support."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import contents
from safetensors.torch import save_file
from tiers import slow_but
from torch_model import random_tensors

import stem_edge
from stem_edge.config import ModelConfig
from stem_edge.errors import CheckpointError
from stem_edge.export.checkpoints.hugging_face.names import tensor_name
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.export.tokenizers.tokenizer import convert_tokenizer

CONFIG = ModelConfig(
    vocab_size=260, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64,
    stem_layers=(), norm_eps=1e-5, rope_theta=1e4, max_context=64, rope_interleaved=False,
)  # fmt: skip


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder in Hugging Face's form."""
    folder = tmp_path / "llama"
    folder.mkdir()
    tensors, _ = random_tensors(CONFIG, 0)
    save_file({tensor_name(n): t for n, t in tensors.items()}, folder / "model.safetensors")
    described = {
        "model_type": "llama",
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(described))
    tokenizer = convert_tokenizer("bytes", None, add_bos=True)
    (folder / "tokenizer.json").write_text(tokenizer.json)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer.config))
    return folder


def test_a_hugging_face_folder_may_hold_params_of_another_kind(llama: Path) -> None:
    (llama / "params.json").write_text('{"dim": 32, "n_layers": 2}')  # as Mistral's do
    assert read_checkpoint(llama).config == CONFIG


def test_folders_that_are_not_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    step = "run/checkpoints/0000000100/params.json"
    bundle = ("bundle/manifest.json", "weights/model.safetensors")
    for file in (*bundle, step, "run/consolidated/params.json", "run/reference.npz"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("{}")
    for path, expected in (
        (tmp_path / "bundle", "is a bundle"),
        (tmp_path / "weights", "no config.json"),
        (tmp_path / "none", "no such checkpoint; give"),
        (tmp_path / "a.txt", "not a checkpoint"),
        (tmp_path / "run", "its folders consolidated, checkpoints/0000000100 are; give"),
        (tmp_path, "its folders run/consolidated are; give"),
        (tmp_path / "empty", "no config.json or params.json"),
    ):
        with pytest.raises(CheckpointError, match=expected):
            read_checkpoint(path)
    with pytest.raises(CheckpointError, match="did you mean hf:org/name"):
        read_checkpoint("org/name")


@pytest.mark.parametrize("otherwise", slow_but([True], [False, True]))
def test_the_bundle_may_lie_inside_of_its_checkpoint(
    llama: Path, tmp_path: Path, otherwise: bool
) -> None:
    """Files that the export writes there are no change of the checkpoint."""
    expected = stem_edge.export_bundle(shutil.copytree(llama, tmp_path / "copy"), tmp_path / "out")
    source = llama / ".." / llama.name if otherwise else llama
    stem_edge.export_bundle(source, llama / "bundle")
    assert contents(llama / "bundle") == contents(expected.path)


def test_an_adapter_is_merged(llama: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]})
    )
    at, random = (
        "base_model.model.model.layers.1.self_attn.q_proj.",
        torch.Generator().manual_seed(0),
    )
    left, right = torch.randn(32, 2, generator=random), torch.randn(2, 32, generator=random)
    pair = {at + "lora_A.weight": right, at + "lora_B.weight": left}
    save_file(pair, adapter / "adapter_model.safetensors")
    merged = tmp_path / "merged"
    shutil.copytree(llama, merged)
    tensors, _ = random_tensors(CONFIG, 0)
    tensors["layers.1.wq"] += left @ right
    save_file({tensor_name(n): t for n, t in tensors.items()}, merged / "model.safetensors")
    exact: Any = {"type": "fp32", "prefill_graph": False}
    plain = stem_edge.export_bundle(llama, tmp_path / "plain", **exact)
    found = stem_edge.export_bundle(llama, tmp_path / "lora", lora=adapter, **exact)
    expected = stem_edge.export_bundle(merged, tmp_path / "expected", **exact)
    with stem_edge.load(found.path) as one, stem_edge.load(expected.path) as other:
        assert abs(one.logits([1, 2, 3, 4]) - other.logits([1, 2, 3, 4])).max() < 1e-4
    with stem_edge.load(found.path) as one, stem_edge.load(plain.path) as other:
        assert abs(one.logits([1, 2, 3, 4]) - other.logits([1, 2, 3, 4])).max() > 0.1
