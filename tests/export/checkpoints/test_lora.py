"""LoRA adapters: W + scale B A, written out here, and adapters that are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import exports
import msgspec
import numpy as np
import pytest
import torch
from matrices import in_memory
from safetensors.torch import save_file

from stem_edge.config import ModelConfig
from stem_edge.export.checkpoints.checkpoint import Checkpoint, TokenizerSource
from stem_edge.export.checkpoints.lora import merge_lora
from stem_edge.numerics.matrix import whole
from stem_edge.numerics.quantize import F32

CONFIG = ModelConfig(
    vocab_size=20, dim=8, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=4, d_ff=12,
    stem_layers=(1,), norm_eps=1e-5, rope_theta=1e4, max_context=16, rope_interleaved=False,
)  # fmt: skip
NAMES = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}
LAYER = {"self_attn.q_proj": "wq", "self_attn.v_proj": "wv", "mlp.gate_proj": "gate"}
LAYER |= {"mlp.up_proj": "up", "mlp.down_proj": "down"}
NAMES |= {f"model.layers.{n}.{a}": f"layers.{n}.{b}" for n in range(2) for a, b in LAYER.items()}
OPTIONS: dict[str, Any] = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none", "init_lora_weights": True,
    "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}, "fan_in_fan_out": False,
    "target_modules": ["q_proj"], "modules_to_save": None, "task_type": "CAUSAL_LM",
    "lora_dropout": 0.1, "inference_mode": True, "base_model_name_or_path": "base",
    "use_dora": False, "megatron_core": "megatron.core", "qalora_group_size": 16,
}  # fmt: skip
Q, UP, DOWN = (f"model.layers.0.{part}" for part in LAYER if "v" not in part and "g" not in part)
EMBED = "model.embed_tokens"


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def base(*, tied: bool = False) -> Checkpoint:
    """A model of random weights in memory."""
    config = msgspec.structs.replace(CONFIG, tied_head=tied)
    shapes = config.backbone_shapes().items()
    backbone = {name: in_memory(drawn(*s, seed=n).numpy()) for n, (name, s) in enumerate(shapes)}
    names = {name: ours for name, ours in NAMES.items() if ours in backbone}
    tables = {1: in_memory(drawn(20, 12).numpy())}
    tokenizer = TokenizerSource("bytes", None, add_bos=True)
    return Checkpoint(Path("base"), config, backbone, tables, tokenizer, ("a",), names=names)


def pair(module: str, rows: int, columns: int, rank: int = 2) -> dict[str, torch.Tensor]:
    """A and B of a linear module."""
    return {
        f"{module}.lora_A.weight": drawn(rank, columns, seed=7),
        f"{module}.lora_B.weight": drawn(rows, rank, seed=8),
    }


def product(tensors: Mapping[str, torch.Tensor]) -> F32:
    """B A of the only pair in `tensors`."""
    a, b = (value.double() for _, value in sorted(tensors.items()))
    found: F32 = (b @ a).numpy()
    return found


def save(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    prefix: str = "base_model.model.",
    **options: Any,
) -> Path:
    folder.mkdir(exist_ok=True)
    described = {k: v for k, v in (OPTIONS | options).items() if v is not ...}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    named = {prefix + name: value.contiguous() for name, value in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def change(checkpoint: Checkpoint, adapter: Path, name: str) -> F32:
    """Return what the adapter adds to a matrix, after checking that nothing else changes."""
    merged = merge_lora(checkpoint, adapter)
    for other, matrix in checkpoint.backbone.items():
        if other != name:
            assert np.array_equal(whole(merged.backbone[other]), whole(matrix))
    return whole(merged.backbone[name]) - whole(checkpoint.backbone[name])


def refused(adapter: Path, *parts: str, tied: bool = False) -> None:
    exports.refused(lambda: merge_lora(base(tied=tied), adapter), adapter, *parts)


@pytest.mark.parametrize(
    ("module", "rows", "columns"), [(Q, 8, 8), (UP, 12, 8), (DOWN, 8, 12), ("lm_head", 20, 8)]
)
def test_a_linear_module_gains_scale_b_a(
    tmp_path: Path, module: str, rows: int, columns: int
) -> None:
    tensors = pair(module, rows, columns)
    found = change(base(), save(tmp_path, tensors), NAMES[module])
    assert np.abs(found - 6 / 2 * product(tensors)).max() < 1e-5


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({"use_rslora": True}, 6 / 2**0.5),
        ({"lora_alpha": 1.5}, 0.75),
        ({"fan_in_fan_out": True}, 3.0),  # changes only how the trainer stores W
        ({"rank_pattern": None, "alpha_pattern": None}, 3.0),
        ({"use_rslora": ..., "rank_pattern": ..., "alpha_pattern": ...}, 3.0),
        ({"init_lora_weights": "eva", "eva_config": {"rho": 2.0}}, 3.0),
    ],
)
def test_the_scale(tmp_path: Path, options: dict[str, Any], scale: float) -> None:
    tensors = pair(Q, 8, 8)
    found = change(base(), save(tmp_path, tensors, **options), "layers.0.wq")
    assert np.abs(found - scale * product(tensors)).max() < 1e-5


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("peft_type", "IA3", "'LORA'"), ("peft_type", ..., "'LORA'"), ("bias", "all", "'none'"),
        ("init_lora_weights", "pissa", "True or False"), ("use_dora", True, "False"),
        ("lora_bias", True, "False"), ("ensure_weight_tying", True, "False"),
        ("trainable_token_indices", [3], "off"), ("layer_replication", [[0, 2]], "off"),
        ("target_parameters", ["experts"], "off"), ("use_what_comes_next", True, "False"),
    ],
)  # fmt: skip
def test_an_unsupported_option_is_refused_by_name(
    tmp_path: Path, name: str, value: object, expected: str
) -> None:
    options: dict[str, Any] = {name: value}
    adapter = save(tmp_path, pair(Q, 8, 8), **options)
    found = None if value is ... else value
    refused(adapter, f"{name} is {found!r}", f"expected {expected}", "merge_and_unload")


def moved(tensors: dict[str, torch.Tensor], old: str, new: str) -> dict[str, torch.Tensor]:
    return {name.replace(old, new): value for name, value in tensors.items()}


OPTIONS_OUT_OF_RANGE: list[tuple[dict[str, Any], str]] = [
    ({"r": 0}, "$.r"), ({"r": ...}, "`r`"), ({"lora_alpha": "6"}, "lora_alpha"),
    ({"lora_alpha": 1e30}, "lora_alpha"), ({"rank_pattern": {"q_proj": 4}}, "expected off: merge it"),
    ({"alpha_pattern": {"q_proj": 4}}, "expected off: merge it"),
]  # fmt: skip
OTHER_TENSORS: list[tuple[dict[str, torch.Tensor], list[str]]] = [
    (moved(pair(Q, 8, 8), "q_proj", "x_proj"), [f"{Q[:-6]}x_proj is not a matrix"]),
    (pair("model.layers.1.mlp.up_proj", 12, 8), ["layers.1.mlp.up_proj is not a matrix"]),
    (pair("model.layers.9.mlp.up_proj", 12, 8), ["layers.9.mlp.up_proj is not a matrix"]),
    ({"score.weight": drawn(2, 8)}, ["score.weight", "plain LoRA"]),
    (pair(Q, 8, 8, rank=3), ["lora_A.weight is [3, 8], expected [2, 8]"]),
    (pair(Q, 9, 8), ["lora_B.weight is [9, 2], expected [8, 2]"]),
    (pair("model.norm", 8, 1), ["model.norm.lora_A.weight is [2, 1]"]),
    ({f"{Q}.lora_B.weight": drawn(8, 2)}, ["lora_A.weight is missing, expected [2, 8]"]),
    ({f"{Q}.lora_A.weight": drawn(2, 8)}, ["lora_B.weight is missing, expected [8, 2]"]),
    ({f"{EMBED}.lora_embedding_A": drawn(2, 20)}, ["lora_embedding_A", "plain LoRA"]),
    ({f"{EMBED}.modules_to_save.weight": drawn(20, 8)}, ["modules_to_save", "plain LoRA"]),
    ({f"{Q}.lora_magnitude_vector": drawn(8)}, ["lora_magnitude_vector", "plain LoRA"]),
    ({f"{Q}.lora_A.weight": drawn(2, 8).to(torch.int8)}, ["lora_A.weight is I8", "F32"]),
    ({}, ["no tensors"]),
    (pair(Q, 8, 8) | {f"{Q}.lora_B.bias": drawn(8)}, ["lora_B.bias", "plain LoRA"]),
]


@pytest.mark.parametrize(
    ("tensors", "options", "parts"),
    [
        *(
            (pair(Q, 8, 8), options, ["_config.json", part])
            for options, part in OPTIONS_OUT_OF_RANGE
        ),
        *((tensors, {}, ["_model.safetensors", *parts]) for tensors, parts in OTHER_TENSORS),
    ],
)
def test_options_and_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], options: dict[str, Any], parts: list[str]
) -> None:
    refused(save(tmp_path, tensors, **options), *parts)


def test_a_tied_head_is_refused(tmp_path: Path) -> None:
    adapter = save(tmp_path, pair("lm_head", 20, 8))
    refused(adapter, "lm_head is not a matrix", "merge_and_unload", tied=True)


def test_a_folder_of_another_kind_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "no adapter_config.json")
    (tmp_path / "adapter_config.json").write_text("[1]")
    refused(tmp_path, "adapter_config.json: not the options")


def test_a_pickle_is_refused_with_advice(tmp_path: Path) -> None:
    adapter = save(tmp_path, pair(Q, 8, 8))
    (adapter / "adapter_model.safetensors").unlink()
    refused(adapter, "adapter_model.safetensors: cannot open")
