"""Weights that were trained for 4 bits: found, and exported as they were trained."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_folders import make_gemma
from installed import DATA
from oracle import dequantized
from tiers import slow_but
from torch import Tensor

import stem_edge
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.export.job.plan import Plan, plan_of
from stem_edge.export.job.recipe import Recipe
from stem_edge.export.job.table_plan import RowStorage
from stem_edge.export.job.trained_grid import keep_trained_grid, trained_kinds
from stem_edge.graph.formats import BackboneFormat
from stem_edge.numerics.matrix import whole
from stem_edge.runtime.rows.table_arrays import open_tables

SIZES: dict[str, Any] = {
    "vocab_size": 307, "vocab_size_per_layer_input": 307, "hidden_size": 64,
    "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "global_head_dim": 32, "hidden_size_per_layer_input": 32,
}  # fmt: skip


def on_grid(matrix: Tensor, block: int = 32) -> Tensor:
    """Round as Q4_0 does: codes -8 to 7, a float16 scale for each block."""
    blocks = matrix.view(matrix.shape[0], -1, block)
    peaks = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
    scales = (peaks / -8).half().float()
    return ((blocks / scales).round().clamp(-8, 7) * scales).view_as(matrix)


def checkpoint(
    folder: Path, dtype: torch.dtype, names: tuple[str, ...] = (), block: int = 32
) -> Path:
    """Write a model whose matrices lie on a grid; names: parts of the names of those that do."""
    model = make_gemma(**SIZES)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.ndim == 2 and (not names or any(part in name for part in names)):
                tensor.copy_(on_grid(tensor, block).to(dtype))
    model.to(dtype).save_pretrained(folder)
    shutil.copy(DATA / "conformance" / "gemma4-text" / "tokenizer.json", folder)
    return folder


def chosen(folder: Path, **options: Any) -> tuple[Plan, str]:
    """Return how an export would store a checkpoint, and what it would say."""
    found = keep_trained_grid(plan_of(read_checkpoint(folder), Recipe(**options)))
    return found, "; ".join(found.source.notes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("calibrated", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_export_keeps_the_grid(tmp_path: Path, dtype: torch.dtype, calibrated: bool) -> None:
    folder = checkpoint(tmp_path / "checkpoint", dtype)
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(90, size=512))
    text = tmp_path / "ids.npy" if calibrated else None
    bundle = stem_edge.export_bundle(
        folder, tmp_path / "out", prefill_graph=False, calibration=text
    )
    backbone, tables = bundle.manifest.backbone, bundle.manifest.tables
    assert backbone is not None
    assert tables is not None
    kinds = backbone.type_of("ple_gate"), tables.row_type
    assert (backbone.block_size, *kinds) == (32, "int4", "int4")
    source = read_checkpoint(folder).backbone
    for name, stored in dequantized(bundle).items():
        values = (torch.from_numpy(np.array(whole(of))).to(dtype) for of in (stored, source[name]))
        assert torch.equal(*values)
    assert (backbone.tied, backbone.type_of("head"), backbone.matrices) == (True, "int4", {})
    assert not backbone.asymmetric
    assert "trained for 4 bits in blocks of 32 and are kept as trained" in " ".join(
        bundle.manifest.report.notes
    )


@pytest.mark.parametrize("block", slow_but([16], [16, 32]))
def test_rows_are_those_of_training(tmp_path: Path, block: int) -> None:
    """Rounding what is stored gives the checkpoint, bit for bit."""
    folder = checkpoint(tmp_path / "checkpoint", torch.bfloat16, (), block)
    stem_edge.export_bundle(folder, tmp_path / "out", prefill_graph=False)
    source = read_checkpoint(folder)
    with open_tables(tmp_path / "out") as tables:
        stored = torch.from_numpy(np.array(tables[5, 3]))
    assert torch.equal(stored.bfloat16().float(), torch.from_numpy(source.tables[3].rows(5, 6)[0]))


@pytest.mark.parametrize(
    ("options", "size", "words"),
    [
        ({}, 32, "kept"),
        ({"type": "int4"}, 32, "kept"),
        ({"type": "int8", "rows": "int8"}, 32, ""),
    ],
)
def test_what_is_asked_for_goes_first(
    tmp_path: Path, options: dict[str, Any], size: int, words: str
) -> None:
    found, said = chosen(checkpoint(tmp_path, torch.bfloat16), **options)
    assert getattr(found.format, "block_size", 0) == size
    assert words in said if words else not said


@pytest.mark.parametrize("block", [16, 32])
def test_kinds_that_lie_on_a_grid(tmp_path: Path, block: int) -> None:
    """Others are as in every export, and are not said to be kept."""
    folder = checkpoint(tmp_path, torch.bfloat16, ("mlp", "per_layer_input_gate"), block)
    assert trained_kinds(read_checkpoint(folder)) == dict.fromkeys(
        ("gate", "up", "down", "ple_gate"), block
    )
    found, said = chosen(folder)
    assert (
        said
        == f"gate, up, down, ple_gate were trained for 4 bits in blocks of {block} and are kept as trained"
    )
    assert isinstance(found.format, BackboneFormat)
    assert found.format.kinds == {"ple_gate": "int4"} and found.format.asymmetric
    assert found.fixed >= {"gate", "up", "down", "ple_gate"} and "wo" not in found.fixed
    assert found.rows == RowStorage("int8", 128)
