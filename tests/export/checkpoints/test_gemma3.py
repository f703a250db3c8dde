"""Gemma 3's text models, alone and inside multimodal ones: read, exported, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact_models import off
from hf_folders import (
    check_logits,
    edit,
    edit_tensors,
    logits,
    make_gemma3,
    refused,
    wrap_gemma,
    written,
)
from installed import bundle_for, export_ggml

import stem_edge
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.graph.formats import EngineName
from stem_edge.layers import LinearRope
from stem_edge.numerics.quantize import F32

IDS = np.random.default_rng(1).integers(97, size=40).tolist()
SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR = {"rope_type": "linear", "factor": 8.0}
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 100.0},
    FULL: LINEAR | {"rope_theta": 1000.0},
}
# Changes to a small model of seven layers, of which one has full attention.
KINDS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "all turn alike": {"rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 100.0} for kind in (SLIDING, FULL)
    }},
    "linear RoPE where all is seen": {"rope_parameters": ROPES},
    "another pattern": {"layer_types": [FULL, SLIDING] * 3 + [SLIDING]},
    "full attention": {"layer_types": [FULL] * 7},
    "windows alone": {"layer_types": [SLIDING] * 7},
    "a cap": {"final_logit_softcapping": 2.0},
    "head of its own": {"tie_word_embeddings": False},
    "odd heads": {"head_dim": 12, "query_pre_attn_scalar": 7},
    "one kv head": {"num_key_value_heads": 1},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_every_kind_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    check_logits(make_gemma3(**KINDS[kind]), tmp_path, IDS)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], F32]:
    folder = tmp_path_factory.mktemp("gemma3")
    model = make_gemma3(vocab_size=310, rope_parameters=ROPES)
    written(model, folder / "checkpoint")
    stem_edge.export_bundle(folder / "checkpoint", folder / "out", type="fp32")
    export_ggml(folder / "checkpoint", folder / "out")
    ids = [*IDS, 256, 299]
    with torch.no_grad():
        return folder / "out", ids, model(torch.tensor([ids])).logits[0].numpy()


def test_each_engine_computes_the_logits_of_transformers(
    bundle: tuple[Path, list[int], F32], engine: EngineName
) -> None:
    path, ids, expected = bundle
    with stem_edge.load(bundle_for(path, engine), engine=engine) as model:
        assert off(model.logits(ids), expected) < 5e-4


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    make_gemma3(vocab_size=310).save_pretrained(tmp_path / "gemma")
    return tmp_path / "gemma"


def test_what_older_versions_wrote(gemma: Path) -> None:
    new = read_checkpoint(gemma).config
    older: dict[str, Any] = {"layer_types": None, "rope_parameters": None}
    edit(gemma, **older, sliding_window_pattern=6, rope_theta=1e6, rope_local_base_freq=1e4)
    assert read_checkpoint(gemma).config == new
    edit(gemma, rope_scaling=LINEAR, sliding_window_pattern=2, rope_local_base_freq=500.0)
    found = read_checkpoint(gemma).config
    assert (found.rope_theta, found.window_layers) == (500, (0, 2, 4, 6))
    assert {layer.rope.scaling for layer in found.layers} == {None, LinearRope(8.0)}


@pytest.mark.parametrize("older", [False, True])
def test_the_text_model_of_a_multimodal_one(gemma: Path, older: bool) -> None:
    alone = read_checkpoint(gemma)
    wrap_gemma(gemma, image_token_index=300, boi_token_index=298, mm_tokens_per_image=4)
    if older:  # than transformers 5
        edit_tensors(gemma, rename)
    found = read_checkpoint(gemma)
    assert found.config.placeholders == {"an image": 300}
    assert "only the text model is exported" in " ".join(found.notes)
    assert (logits(found, IDS) == logits(alone, IDS)).all()


def rename(tensors: dict[str, torch.Tensor]) -> None:
    for name in [*tensors]:
        inside = name.replace("model.language_model.", "language_model.model.")
        other = name.removeprefix("model.") if inside == name else inside
        tensors[other] = tensors.pop(name)
    tensors["multi_modal_projector.mm_input_projection_weight"] = torch.ones(2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, expected None"),
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_scaling": LINEAR}, "both rope_scaling and rope_parameters are given"),
        ({"rope_parameters": {FULL: {"rope_type": "ntk"}}}, "rope_type is 'ntk'; expected one"),
        ({"rope_parameters": {FULL: 3}}, "got `int` - at `$.rope_parameters[...]`"),
        ({"layer_types": [FULL] * 5}, "expected full_attention or sliding_attention"),
        ({"layer_types": None, "sliding_window_pattern": 0}, ">= 1 - at `$.sliding_window_pattern"),
        ({"sliding_window": None}, "no sliding_window is set"),
        ({"query_pre_attn_scalar": 0}, "division by zero"),
        ({"query_pre_attn_scalar": -1}, "math domain error"),
        ({"dtype": None}, "no dtype"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"head_dim": 24}, "wq is [64, 32], expected [96, 32]"),
        ({"vocab_size": 400}, "embedding is [310, 32], expected [400, 32]"),
        ({"quantization_config": {"quant_method": "gemma"}}, "already quantized (gemma)"),
    ],
)
def test_what_is_refused(gemma: Path, changes: dict[str, Any], words: str) -> None:
    edit(gemma, **changes)
    refused(gemma, words)


@pytest.mark.parametrize("name", ["layers.3.self_attn.q_norm.weight", "norm.weight"])
def test_tensors_that_are_missing(gemma: Path, name: str) -> None:
    edit_tensors(gemma, lambda tensors: tensors.pop("model." + name))
    refused(gemma, "no tensor model." + name)
