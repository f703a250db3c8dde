"""Checkpoints of the public STEM trainer: unusual ones that are read, and wrong ones."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import exports
import numpy as np
import pytest
import torch
from make_checkpoint import Layout, Shape, write_checkpoint
from torch_model import torch_logits
from whole_model import forward

from stem_edge.export.checkpoints.lingua import read_checkpoint
from stem_edge.numerics.matrix import whole


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in both layouts. Do not change it."""
    folder = tmp_path_factory.mktemp("lingua")
    write_checkpoint(folder / "training", Shape(), parts=4)
    write_checkpoint(folder / "consolidated", Shape(), layout="consolidated")
    return folder


@pytest.fixture
def training(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written / "training", tmp_path / "training"))


@pytest.fixture
def consolidated(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written / "consolidated", tmp_path / "consolidated"))


def edit_params(folder: Path, **model: Any) -> None:
    path = folder / "params.json"
    params = json.loads(path.read_text())
    for key, value in model.items():
        if value is ...:
            params["model"].pop(key)
        else:
            params["model"][key] = value
    path.write_text(json.dumps(params))


def refused(folder: Path, *parts: str) -> None:
    exports.refused(lambda: read_checkpoint(folder), *parts)


@pytest.mark.parametrize("layout", ["training", "consolidated"])
def test_layers_that_keep_their_up_projection(tmp_path: Path, layout: Layout) -> None:
    """Models of stem_dag, whose `forward` is (1 - s) W x + s row, the reverse of what its text says."""
    path = write_checkpoint(tmp_path / "c", Shape(mixed=True), layout=layout)
    checkpoint = read_checkpoint(path)
    config = checkpoint.config
    tensors = {name: torch.tensor(whole(m)) for name, m in checkpoint.backbone.items()}
    tables = {layer: torch.tensor(whole(table)) for layer, table in checkpoint.tables.items()}
    assert config.stem_ffn == "stem-mix" and tensors["layers.1.mix"] != tensors["layers.2.mix"]
    ids = list(range(20))
    found = forward(config, checkpoint.backbone, checkpoint.rows, ids)
    assert np.abs(found - torch_logits(config, tensors, tables, ids).numpy()).max() < 1e-4


def test_layers_that_add_the_row_to_their_up_projection(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", Shape(mixed=True), layout="consolidated")
    state = torch.load(path / "consolidated.pth", weights_only=True)
    state["model"] = {n: t for n, t in state["model"].items() if not n.endswith("alpha")}
    torch.save(state, path / "consolidated.pth")
    refused(path, "layers.1.up is not part of such a model")
    edit_params(path, alpha_mode="sum")
    assert read_checkpoint(path).config.stem_ffn == "stem-plus"


@pytest.mark.parametrize(
    ("kind", "size", "window"),
    [
        ("llama_window", None, 16),
        ("llama_window", 4, 4),
        ("", 4, 4),
        ("llama_window", 1, 0),
        ("llama", None, 0),
    ],
)
def test_rows_that_are_means(consolidated: Path, kind: str, size: int | None, window: int) -> None:
    edit_params(consolidated, stem_window_size=size)
    path = consolidated / "params.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": kind}))
    assert read_checkpoint(consolidated).config.row_window == window


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "consolidated.pth",
            ["no consolidated.pth, found consolidated_stem.pth", "dcp_to_torch"],
        ),
        ("consolidated_stem.pth", ["no consolidated_stem.pth", "stem_shards"]),
    ],
)
def test_a_missing_consolidated_file_is_named(
    consolidated: Path, name: str, parts: list[str]
) -> None:
    (consolidated / name).unlink()
    refused(consolidated, *parts)


TRAINING = ["consolidated.pth", *(f"stem_shards/stem_model_mp{n}.pt" for n in (0, 2, 3))]


@pytest.mark.parametrize("name", TRAINING)
def test_a_cut_or_missing_file_of_a_training_folder_is_named(training: Path, name: str) -> None:
    os.truncate(training / name, (training / name).stat().st_size // 2)
    refused(training, str(training / name))
    (training / name).unlink()
    if name == "consolidated.pth":
        refused(training, f"format_utils dcp_to_torch {training} {training / name}")
    elif "3" in name:
        refused(training, "table of layer 1 is [300, 48], expected [300, 64]")
    else:
        refused(training, "3 are there", f"not {Path(name).name}")


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ({"dim": 64}, ["disagree", "embedding is [300, 32], expected [300, 64]"]),
        ({"vocab_size": 301}, ["embedding is [300, 32], expected [301, 32]"]),
        ({"stem_embedding_dim": 128}, ["expected [128, 32]"]),
        ({"n_layers": 4}, ["layers.3.attention_norm is missing"]),
        ({"stem_layers": [1]}, ["layers.2.up is missing"]),
        ({"n_kv_heads": 3}, ["n_heads 4 is not a multiple of n_kv_heads 3"]),
        ({"n_heads": None}, ["neither n_heads nor head_dim"]), ({"n_layers": 10**9}, ["n_layers"]),
        ({"dim": -1}, ["dim is -1"]), ({"dim": "32"}, ["params.json", "dim"]),
    ],
)  # fmt: skip
def test_params_that_contradict_the_tensors(
    consolidated: Path, model: dict[str, Any], parts: list[str]
) -> None:
    edit_params(consolidated, **model)
    refused(consolidated, *parts)
