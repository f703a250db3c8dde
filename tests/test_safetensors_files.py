"""Files of tensors: several with an index, damaged ones, other types."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_folders import edit_tensors, refused
from safetensors.torch import load_file, save_file
from stem_format import save_stem
from torch_model import random_tensors

from stem_edge.config import ModelConfig
from stem_edge.export.hf_names import tensor_name
from stem_edge.export.hugging_face import read_checkpoint
from stem_edge.reference import forward, whole


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = ModelConfig(
        vocab_size=97,
        dim=32,
        n_layers=1,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        d_ff=48,
        stem_layers=(),
        norm_eps=1e-5,
        rope_theta=1e4,
        max_context=64,
    )
    tensors, _ = random_tensors(config, 0)
    folder = tmp_path / "model"
    save_stem(folder, config, {tensor_name(name): tensor for name, tensor in tensors.items()})
    return folder


def edit_index(folder: Path, places: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": places})
    )


def logits(folder: Path) -> np.ndarray[Any, Any]:
    found = read_checkpoint(folder)
    return forward(found.config, found.backbone, found.rows, [1, 2, 3])


def shard(folder: Path) -> dict[str, str]:
    """The model again in three files and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    for number, file in enumerate(files):
        save_file({k: tensors[k] for k in list(tensors)[number::3]}, folder / file)
    places = {name: files[number % 3] for number, name in enumerate(tensors)}
    edit_index(folder, places)
    return places


def test_tensors_can_lie_in_several_files(model: Path) -> None:
    expected = logits(model)
    shard(model)
    assert np.array_equal(logits(model), expected)


def test_links_to_other_folders_are_followed(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").rename(tmp_path / "blob")  # as caches of models are laid out
    (model / "model.safetensors").symlink_to(tmp_path / "blob")
    assert read_checkpoint(model).backbone["norm"].shape == (32,)


def test_a_file_that_the_index_names_is_missing(model: Path) -> None:
    shard(model)
    (model / "model-00002-of-00003.safetensors").unlink()
    refused(model, "model-00002-of-00003.safetensors: missing")


@pytest.mark.parametrize(
    "place", ["../secret", "/etc/a.safetensors", "a/b.safetensors", "..", "a\\b.safetensors", ""]
)
def test_the_index_cannot_point_outside_of_the_folder(model: Path, place: str) -> None:
    places = shard(model)
    edit_index(model, places | {"lm_head.weight": place})
    refused(model, "index.json", "lm_head.weight", "expected a .safetensors file of this folder")


def test_an_index_that_does_not_fit_the_files(model: Path) -> None:
    places = shard(model)
    edit_index(model, places | {"model.other.weight": places["lm_head.weight"]})
    refused(model, "index.json: does not fit", "model.other.weight is not in model-0000")
    edit_index(model, places | {"lm_head.weight": places["model.norm.weight"]})
    refused(model, "lm_head.weight")
    edit_index(model, {"lm_head.weight": 3})
    refused(model, "model.safetensors.index.json: not an index")


def test_a_tensor_that_is_in_two_files(model: Path) -> None:
    shard(model)
    shutil.copy(
        model / "model-00001-of-00003.safetensors", model / "model-00002-of-00003.safetensors"
    )
    refused(model, "model-00002-of-00003.safetensors", "is in model-00001")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_cut_file(model: Path, keep: int) -> None:
    path = model / "model.safetensors"
    os.truncate(path, keep % path.stat().st_size)
    refused(model, "model.safetensors: not a safetensors file", "cut or damaged")


def test_a_folder_without_safetensors(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    refused(model, "neither model.safetensors nor", "pytorch_model.bin")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda q: q.to(torch.float8_e4m3fn), ["is F8_E4M3", "expected one of BF16, F16, F32"]),
        (lambda q: q.to(torch.int8), ["is I8", "weights that are not quantized"]),
        (lambda q: q[0, 0].clone(), ["layers.0.wq is [], expected [32, 32]"]),
    ],
)
def test_a_tensor_that_is_no_matrix_of_floats(
    model: Path, change: Callable[[torch.Tensor], torch.Tensor], parts: list[str]
) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    edit_tensors(model, lambda tensors: tensors.update({name: change(tensors[name])}))
    refused(model, *parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_floats_are_read_as_float32(model: Path, dtype: torch.dtype) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    stored = load_file(model / "model.safetensors")[name].to(dtype)
    edit_tensors(model, lambda tensors: tensors.update({name: stored}))
    matrix = read_checkpoint(model).backbone["layers.0.wq"]
    assert matrix.nbytes == stored.nbytes
    assert whole(matrix).dtype == np.float32
    assert np.array_equal(matrix.rows(3, 7), stored[3:7].float().numpy())
