"""Gemma 3n's text models, alone and inside multimodal ones: read, and refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_folders import check_logits, edit, edit_tensors, logits, make_gemma3n, refused, wrap_gemma
from installed import DATA
from tiers import slow_but

from stem_edge.export.checkpoints.readers import read_checkpoint

CONFORMANCE = DATA / "conformance" / "gemma3n-text"
IDS = np.random.default_rng(1).integers(97, size=40).tolist()  # some beyond the table
SLIDING, FULL = "sliding_attention", "full_attention"
# Changes to a small model of six layers: three have full attention, and two borrow K and V.
KINDS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "nobody borrows": {"num_kv_shared_layers": 0},
    "most borrow": {"num_kv_shared_layers": 4},
    "the usual layers": {"layer_types": None, "num_kv_shared_layers": 0},
    "no full attention": {"layer_types": [SLIDING] * 6},
    "full attention": {"layer_types": [FULL] * 6},
    "no sparsity": {"activation_sparsity_pattern": [0.0] * 6},
    "the second stream is active": {"altup_active_idx": 1},
    "the last stream is active": {"altup_active_idx": 3, "altup_correct_scale": False},
    "the active stream is not scaled": {"altup_correct_scale": False},
    "two streams": {"altup_num_inputs": 2},
    "five streams": {"altup_num_inputs": 5, "altup_active_idx": 4},
    "as many rows as ids": {"vocab_size_per_layer_input": 97},
    "FFNs of two widths": {"intermediate_size": [160, 192, 160, 160, 192, 160]},
    "one width for all": {"intermediate_size": 160},
    "another cap": {"final_logit_softcapping": 3.0},
    "all turn alike": {"rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        FULL: {"rope_type": "default", "rope_theta": 100.0},
    }},
    "head of its own": {"tie_word_embeddings": False},
    "odd heads": {"head_dim": 12},
}  # fmt: skip
FAST = ["as it is", "no sparsity", "the last stream is active", "two streams", "one width for all"]
FAST += ["head of its own"]


@pytest.mark.parametrize("kind", slow_but(FAST, KINDS))
def test_logits_of_every_kind_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    check_logits(make_gemma3n(**KINDS[kind]), tmp_path, IDS)


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CONFORMANCE, tmp_path / "gemma"))


def test_what_older_versions_wrote(gemma: Path) -> None:
    new = read_checkpoint(gemma).config
    options: dict[str, Any] = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 256,
    }
    edit(gemma, rope_parameters=None, rope_scaling=None, altup_lr_multiplier=1.0, **options)
    assert read_checkpoint(gemma).config == new
    edit(gemma, rope_local_base_freq=500.0)
    assert read_checkpoint(gemma).config.rope_theta == 500


def test_the_text_model_of_a_multimodal_one(gemma: Path) -> None:
    alone = read_checkpoint(gemma)
    wrap_gemma(gemma, image_token_id=303, eoi_token_id=302, audio_soft_tokens_per_image=188)
    found = read_checkpoint(gemma)
    # Others are beyond this vocabulary.
    assert found.config.placeholders == {"an image": 303, "the end of an image": 302}
    assert "only the text model is exported" in " ".join(found.notes)
    assert (logits(found, IDS) == logits(alone, IDS)).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"hidden_activation": "relu"},
            "hidden_activation is 'relu', expected 'gelu_pytorch_tanh'",
        ),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling is {"),
        ({"rope_parameters": {FULL: {}}}, "expected sliding_attention in it"),
        ({"altup_num_inputs": 1}, ">= 2 - at `$.altup_num_inputs"),
        ({"altup_num_inputs": 9}, "streams 9; expected one of 1 to 8 streams"),
        ({"altup_num_inputs": 5}, "no tensor model.altup_projections.3.weight"),
        ({"altup_num_inputs": 3}, "altup_router is [4, 64], expected [3, 64]"),
        ({"altup_active_idx": 4}, "active_stream is 4 and streams 4"),
        ({"altup_active_idx": -1}, "active_stream is -1"),
        ({"laurel_rank": 0}, ">= 1 - at `$.laurel_rank"),
        ({"laurel_rank": 16}, "laurel_in is [8, 64], expected [16, 64]"),
        ({"hidden_size_per_layer_input": 0}, ">= 1 - at `$.hidden_size_per_layer_input"),
        ({"activation_sparsity_pattern": [0.95] * 5}, "expected a number for each of 6 layers"),
        ({"activation_sparsity_pattern": [1.0] * 6}, "sparsity is 1.0; expected 0 to below 1"),
        ({"activation_sparsity_pattern": [0.5, 2.0, *[0.0] * 4]}, "sparsity is 2.0"),
        ({"intermediate_size": [96] * 7}, "expected a number for each of 6 layers"),
        ({"intermediate_size": [96] * 5 + [-1]}, "layer_kinds has a size out of range"),
        ({"intermediate_size": list(range(96, 102))}, "gate is [96, 64], expected [97, 64]"),
        ({"num_kv_shared_layers": 4}, "no layer before it has its kind"),
        ({"num_kv_shared_layers": 6}, "borrowed_kv_layers is 6 of 6"),
        ({"vocab_size_per_layer_input": 311}, "ple_records is 311 of 310"),
        ({"vocab_size_per_layer_input": 290}, "is [300, 96]; expected [290, 96]"),
        ({"layer_types": [FULL] * 5}, "expected full_attention or sliding_attention"),
        ({"dtype": None}, "no dtype"),
        ({"is_causal": False}, "is_causal is False, expected True"),
    ],
)
def test_what_is_refused(gemma: Path, changes: dict[str, Any], words: str) -> None:
    edit(gemma, **changes)
    refused(gemma, words)


@pytest.mark.parametrize(
    "name",
    [
        "embed_tokens_per_layer.weight",
        "altup_projections.2.weight",
        "altup_unembed_projections.0.weight",
        "layers.3.altup.correct_output_scale",
        "layers.5.altup.prediction_coefs.weight",
        "layers.0.laurel.post_laurel_norm.weight",
    ],
)
def test_tensors_that_are_missing(gemma: Path, name: str) -> None:
    edit_tensors(gemma, lambda tensors: tensors.pop("model." + name))
    refused(gemma, "no tensor model." + name)
