"""Checkpoints of compressed-tensors (W4A16 and others of its form) keep their codes, scales and zero points."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gemma_folders import VOCAB_SIZE, make_tokenizer
from hf_folders import SIZES, edit, edit_tensors, randomized, refused
from installed import needs_ggml
from loading import load_fixed
from packed_folders import divergence
from tiers import slow_but
from transformers import LlamaConfig, LlamaForCausalLM

import stem_edge
from stem_edge.bundle.opening import open_bundle
from stem_edge.errors import CheckpointError, ExportError
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.export.job import stored_types
from stem_edge.export.tensor_files.packed import is_grouped
from stem_edge.graph.decode import decoding
from stem_edge.graph.weight_plan import Blocks
from stem_edge.numerics.quantizing import dequantize_blocks

WIDE = SIZES | {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 128}
IDS = list(range(3, 43))
FORMS: dict[str, dict[str, Any]] = {
    "symmetric": {},
    "asymmetric": {"points": True},
    "groups of 64": {"group": 64, "points": True},
    "a scale for each row": {"group": 0},
    "8 bits": {"bits": 8, "points": True},
    "2 bits": {"bits": 2},
    "8 bits in one layer": {"first": 8, "points": True},
}


def words(codes: Any, bits: int) -> torch.Tensor:
    """Pack codes [N, K] along K into words of 32 bits, the first code lowest."""
    count = 32 // bits
    wide = np.pad(codes, ((0, 0), (0, -codes.shape[1] % count))).astype(np.uint32)
    shifted = wide.reshape(len(wide), -1, count) << (np.arange(count, dtype=np.uint32) * bits)
    return torch.from_numpy(shifted.sum(axis=2, dtype=np.uint32).view(np.int32))


def write_grouped(
    folder: Path,
    bits: int = 4,
    group: int = 32,
    points: bool = False,
    first: int = 0,
    **changes: Any,
) -> Any:
    """Write a folder with random codes; return transformers' model of the same values, in float32.

    first: bits in the first layer, if others.
    """
    model = randomized(LlamaForCausalLM(LlamaConfig(**(WIDE | changes))).eval())
    random, stored, usual = np.random.default_rng(2), dict[str, torch.Tensor](), bits
    for name, module in model.model.layers.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        bits = first if first and name.startswith("0.") else usual
        rows, width = module.weight.shape
        groups = width // group if group else 1
        codes = random.integers(1 << bits, size=(rows, groups, width // groups))
        zeros = random.integers(1 << bits, size=(rows, groups))
        zeros = zeros if points else np.full_like(zeros, 1 << (bits - 1))
        scales = (
            torch.from_numpy(random.random((rows, groups), np.float32))
            * 4
            / (1 << bits)
            / width**0.5
        )
        scales = scales.bfloat16()
        values = torch.from_numpy(codes - zeros[:, :, None]) * scales.float()[:, :, None]
        module.weight.data = values.reshape(rows, width)
        at = f"model.layers.{name}.weight_"
        stored[at + "packed"] = words(codes.reshape(rows, width), bits)
        stored[at + "scale"], stored[at + "shape"] = scales, torch.tensor([rows, width])
        if points:
            stored[at + "zero_point"] = words(zeros.T, bits).T.contiguous()
    model.save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>"}))
    packed = {name.removesuffix("_packed") for name in stored}

    def replace(tensors: dict[str, torch.Tensor]) -> None:
        for name in packed & tensors.keys():
            del tensors[name]
        tensors.update(stored)

    edit_tensors(folder, replace)
    edit(folder, quantization_config=scheme())
    return model


def scheme(weights: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Return what config.json says about codes; weights and changes depart from W4A16."""
    rounded = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32} | (
        weights or {}
    )
    group = {"targets": ["Linear"], "weights": rounded, "input_activations": None}
    found = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
    }
    return found | {"config_groups": {"group_0": group}, "kv_cache_scheme": None} | changes


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grouped")
    write_grouped(folder, points=True)
    return folder


@pytest.mark.parametrize("form", slow_but(["asymmetric", "8 bits in one layer", "2 bits"], FORMS))
def test_values_are_those_of_transformers_and_codes_are_kept(form: str, tmp_path: Path) -> None:
    model, out = write_grouped(tmp_path / "in", **FORMS[form]), tmp_path / "out"
    source = read_checkpoint(tmp_path / "in")
    gate = model.model.layers[1].mlp.gate_proj.weight.detach().numpy()
    matrix = source.backbone["layers.1.gate"]
    assert is_grouped(matrix)
    np.testing.assert_array_equal(matrix.rows(5, 23), gate[5:23])
    np.testing.assert_array_equal(matrix.part(11, 40).rows(2, 9), gate[13:20])
    assert matrix.codes is not None
    if matrix.codes.points is not None:
        with pytest.raises(CheckpointError, match=r"gate_proj.weight_packed has .* no zero points"):
            matrix.columns(16)
    with pytest.MonkeyPatch.context() as patch:  # so that nothing is rounded
        patch.setattr(stored_types, "_usual_head", lambda _: "fp32")
        stem_edge.export_bundle(tmp_path / "in", out, progress=False)
    assert count_kept(source.backbone, out) == 2 * WIDE["num_hidden_layers"] + 6
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0].numpy()
    with load_fixed(out, warm_start=False, kv="fp32") as loaded:
        assert divergence(logits, loaded.logits(IDS)) < 2e-2  # inputs of products are rounded


def count_kept(backbone: Any, out: Path) -> int:
    """Check that products of one matrix have its values; return their number."""
    opened, kept = open_bundle(out), 0
    assert opened.manifest.backbone is not None
    plan = decoding(opened.manifest.model, None, opened.manifest.backbone).plan
    data = np.fromfile(opened.file(plan.file), np.uint8)
    for item in plan.items:
        if not isinstance(item, Blocks) or len(item.parts) > 1:
            continue
        matrix, piece = backbone[item.parts[0]], item.pieces[0]
        assert is_grouped(matrix)
        codes, scales, points = (
            data[tensor.offset :][: tensor.nbytes]
            for tensor in (piece.codes, piece.scales, piece.points or piece.codes)
        )
        rows = matrix.shape[0]
        found = dequantize_blocks(
            codes.reshape(rows, -1),
            scales.view("<f4").reshape(rows, -1),
            item.bits,
            None if piece.points is None else points.reshape(rows, -1),
        )
        np.testing.assert_array_equal(found, matrix.rows(0, rows))
        kept += 1
    return kept


UP = "model.layers.0.mlp.up_proj.weight_"
SHAPES: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "words of another width": (
        {UP + "packed": torch.zeros(128, 7, dtype=torch.int32)},
        "is [128, 7]; expected words of 32 bits",
    ),
    "words of other rows": (
        {UP + "packed": torch.zeros(12, 8, dtype=torch.int32)},
        "is [12, 8]; expected words of 32 bits",
    ),
    "words as floats": ({UP + "packed": torch.zeros(128, 8)}, "is F32; expected one of I32"),
    "a shape of three": ({UP + "shape": torch.tensor([1, 2, 3])}, "expected words of 32 bits"),
    "another shape": ({UP + "shape": torch.tensor([128, 32])}, "expected"),
    "a negative shape": ({UP + "shape": torch.tensor([-1, -2])}, "expected words of 32 bits"),
    "groups of 4": ({UP + "scale": torch.ones(128, 16)}, "with groups of a multiple of 16"),
    "scales of other rows": ({UP + "scale": torch.ones(3, 2)}, "expected [128, groups]"),
    "scales without groups": ({UP + "scale": torch.ones(128, 0)}, "expected [128, groups]"),
    "points of other rows": (
        {UP + "zero_point": torch.zeros(3, 2, dtype=torch.int32)},
        "is [3, 2]; expected [16, 2]",
    ),
    "columns in another order": (
        {UP + "g_idx": torch.zeros(64, dtype=torch.int32)},
        "weight_g_idx is not part of the model",
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_what_does_not_fit_is_refused(case: str, one: Path, tmp_path: Path) -> None:
    tensors, words = SHAPES[case]
    folder = copied(one, tmp_path)
    edit_tensors(folder, lambda found: found.update(tensors))
    refused(folder, words)


def test_a_missing_part_is_named(one: Path, tmp_path: Path) -> None:
    folder = copied(one, tmp_path)
    edit_tensors(folder, lambda found: found.pop(UP + "scale"))
    refused(folder, "no tensor", UP + "scale")


OTHERS: dict[str, Callable[[], Any]] = {
    "codes of floats": lambda: scheme({"type": "float"}),
    "codes of 7 bits": lambda: scheme({"num_bits": 7}),
    "another format": lambda: scheme(format="marlin-24"),
    "rotated": lambda: scheme(transform_config={"config_groups": {"R1": {}}}),
    "a cache of 8 bits": lambda: scheme(kv_cache_scheme={"num_bits": 8}),
    "no groups": lambda: scheme(config_groups=None),
    "a group of nothing": lambda: scheme(config_groups={"group_0": None}),
    "rounded inputs": lambda: scheme(
        config_groups={"g": {"weights": {"type": "int"}, "input_activations": {"num_bits": 8}}}
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_schemes_are_refused(case: str, one: Path, tmp_path: Path) -> None:
    folder = copied(one, tmp_path)
    edit(folder, quantization_config=OTHERS[case]())
    refused(folder, "already quantized (compressed-tensors)")


@needs_ggml
def test_ggml_refuses_them(one: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"onnxruntime only|no type of ggml"):
        stem_edge.export_bundle(one, tmp_path / "out", engine="ggml", progress=False)


def copied(folder: Path, tmp_path: Path) -> Path:
    out = tmp_path / "changed"
    out.mkdir()
    for path in folder.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"
    return out
