"""Gemma checkpoints that were trained for few bits: codes and ranges are kept, and computed exactly."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gemma_folders import VOCAB_SIZE
from installed import needs_ggml
from loading import load_fixed
from packed_folders import Packed, divergence, write_packed
from safetensors.torch import load_file, save_file
from tiers import slow_but
from whole_model import forward

import stem_edge
from stem_edge.bundle.opening import open_bundle
from stem_edge.errors import BackendError, CheckpointError, ExportError
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.graph.decode import decoding
from stem_edge.graph.ir import Tensor
from stem_edge.graph.special.steps import places
from stem_edge.graph.weight_plan import Blocks
from stem_edge.numerics.quantizing import dequantize_blocks
from stem_edge.runtime.rows.store import open_store

FORMS: dict[str, dict[str, Any]] = {
    "ranges": {},
    "no ranges": {"ranges": False},
    "rows of 2 bits, a scale for each layer": {"row_scales": 6, "row_bits": 2},
    "blocks of few columns": {"hidden_size": 256, "intermediate_size": 400},
    "wide, keys are values": {
        "hidden_size": 192,
        "intermediate_size": 320,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
    },
}


@pytest.fixture(scope="module", params=slow_but(["ranges", "blocks of few columns"], FORMS))
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return write_packed(tmp_path_factory.mktemp("packed"), **FORMS[request.param])


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_packed(tmp_path_factory.mktemp("one")).folder


@pytest.fixture(scope="module")
def bundle(packed: Packed) -> Path:
    out = packed.folder / "bundle"
    stem_edge.export_bundle(packed.folder, out, progress=False)
    return out


def test_codes_scales_and_ranges_are_those_of_transformers(packed: Packed) -> None:
    source = read_checkpoint(packed.folder)
    found = forward(source.config, source.backbone, source.rows, packed.ids)
    assert divergence(packed.logits, found) < 1e-3
    assert source.config.ranges or np.abs(found - packed.logits).max() < 1e-4
    assert source.config.tied_head  # whatever the file says, because both are one matrix


def test_a_bundle_diverges_as_little_as_float32_does(packed: Packed, bundle: Path) -> None:
    """Whole numbers are multiplied exactly, but a float that is nearly between two steps may go to the other."""
    with load_fixed(bundle, kv="fp32") as model:
        assert divergence(packed.logits, model.logits(packed.ids)) < 1e-3


def test_greedy_texts_are_those_of_transformers(packed: Packed, bundle: Path) -> None:
    ids = packed.ids[:8]
    with torch.no_grad():
        theirs = packed.model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    with load_fixed(bundle, kv="fp32") as model:
        ours = [t for c in model.generate(ids, max_new_tokens=12) for t in c.token_ids]
    same = sum(a == b for a, b in zip(ours, theirs[0, 8:].tolist(), strict=False))
    assert same >= 10  # near ties


@pytest.mark.slow
def test_inputs_beyond_their_ranges(tmp_path: Path) -> None:
    """Ranges end before the greatest inputs."""
    apart = list[float]()
    for seed in range(4):
        (folder := tmp_path / str(seed)).mkdir()
        packed = write_packed(folder, seed=seed, reach=0.9)
        stem_edge.export_bundle(folder, folder / "bundle", progress=False)
        with load_fixed(folder / "bundle", kv="fp32") as model:
            apart.append(divergence(packed.logits, model.logits(packed.ids)))
    assert np.mean(apart) < 3e-3  # because -128 becomes -127


def test_matrices_are_stored_without_rounding(packed: Packed, bundle: Path) -> None:
    source, opened = read_checkpoint(packed.folder), open_bundle(bundle)
    assert opened.manifest.backbone is not None
    assert (opened.manifest.backbone.tied, opened.manifest.backbone.head) == (True, "int2")
    format = opened.manifest.table_format
    assert format is not None
    plan = decoding(opened.manifest.model, format.tables, opened.manifest.backbone).plan
    data = np.fromfile(opened.file(plan.file), np.uint8)

    def values(tensor: Tensor, dtype: str) -> Any:
        return data[tensor.offset : tensor.offset + tensor.nbytes].view(dtype).reshape(tensor.dims)

    kept = expected = 0
    for item in plan.items:
        if not isinstance(item, Blocks) or len(item.parts) > 1:
            continue
        if (matrix := source.backbone[item.parts[0]]).codes is not None:
            piece, (count, width) = item.pieces[0], matrix.shape
            codes = values(piece.codes, "u1").reshape(count, -1)
            scales = values(piece.scales, "<f4").reshape(count, -1) / np.float32(item.step or 1)
            found = dequantize_blocks(codes, scales, item.bits)
            start, stop = item.columns if item.step else (0, width)
            found = found[:, places(stop - start, item.block)] if item.step else found
            np.testing.assert_allclose(found, matrix.rows(0, count)[:, start:stop], rtol=1e-6)
            kept += stop - start
            expected += width if start == 0 else 0
    assert kept == expected > 20 * 32


def test_rows_are_stored_without_rounding(packed: Packed, bundle: Path) -> None:
    source, opened = read_checkpoint(packed.folder), open_bundle(bundle)
    format = opened.manifest.table_format
    assert format is not None
    layout = format.tables
    store = open_store(opened.file("tables.zarr"), format)
    try:
        records = store.read(np.arange(9))
        for index, layer in enumerate(layout.layers):
            table = source.tables[layer]
            assert table.codes is not None and table.codes.bits == format.stored.bits
            np.testing.assert_array_equal(layout.unpack(records, index), table.rows(0, 9))
    finally:
        store.close()


def test_other_types_can_be_asked_for(packed: Packed, tmp_path: Path) -> None:
    out = tmp_path / "fp32"
    stem_edge.export_bundle(packed.folder, out, type="fp32", rows="fp32", progress=False)
    with load_fixed(out, kv="fp32") as model:
        assert divergence(packed.logits, model.logits(packed.ids)) < 1e-3


@pytest.mark.parametrize(
    "option",
    [{"type": "int4"}, {"type": "small"}, {"prefill_graph": True}],
)
def test_types_of_other_training_are_refused(
    option: dict[str, Any], one: Path, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match="neither type nor prefill_graph can be chosen"):
        stem_edge.export_bundle(one, tmp_path / "out", progress=False, **option)


def changed(folder: Path, out: Path, **tensors: torch.Tensor | None) -> Path:
    """Copy a folder with some tensors replaced, or left out."""
    out.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((folder / name).read_bytes())
    found = load_file(folder / "model.safetensors") | tensors
    kept = {name: tensor for name, tensor in found.items() if tensor is not None}
    save_file(kept, out / "model.safetensors")
    return out


Q = "model.layers.0.self_attn.q_proj"
TABLE = "model.embed_tokens_per_layer"
REFUSED: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "codes of another width": (
        {f"{Q}.weight": torch.zeros(64, 5, dtype=torch.uint8)},
        "expected codes of",
    ),
    "signed codes of 4 bits": (
        {f"{Q}.weight": torch.zeros(64, 16, dtype=torch.int8)},
        "expected codes of",
    ),
    "codes as floats": ({f"{Q}.weight": torch.zeros(64, 32)}, "is F32; expected one of U8, I8"),
    "scales of other rows": ({f"{Q}.weight_scale": torch.ones(3, 1)}, "a number of scales"),
    "several scales in a row": (
        {f"{Q}.weight_scale": torch.ones(64, 2)},
        "not one scale for each row",
    ),
    "scales of two layers and four": (
        {f"{TABLE}.embedding_scale": torch.ones(VOCAB_SIZE, 2)},
        "2 scales for 96 columns; expected one, or one for each 16",
    ),
    "rows of few tokens": (
        {
            f"{TABLE}.embedding_quantized": torch.zeros(5, 48, dtype=torch.uint8),
            f"{TABLE}.embedding_scale": torch.ones(5, 1),
        },
        "as config.json says",
    ),
    "a scale of a norm": ({"model.norm.weight_scale": torch.ones(32, 1)}, "not part of the model"),
    "a scalar embedding": (
        {
            "model.embed_tokens.embedding_quantized": None,
            "model.embed_tokens.weight": torch.tensor(1.0),
        },
        "disagree|not part of the model",
    ),
    "steps of several numbers": (
        {f"{Q}.input_activation_scale": torch.ones(2)},
        "expected one number",
    ),
    "a negative step": (
        {f"{Q}.input_activation_scale": torch.tensor(-1.0)},
        "ranges of layers.0.wq",
    ),
    "a missing scale": ({f"{Q}.weight_scale": None}, "is U8; expected one of"),
    "a tensor of nothing": ({"model.layers.0.mlp.bias": torch.ones(2)}, "not part of the model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str, one: Path, tmp_path: Path) -> None:
    tensors, words = REFUSED[case]
    with pytest.raises(CheckpointError, match=words):
        read_checkpoint(changed(one, tmp_path / "changed", **tensors))


def test_other_methods_are_refused(one: Path, tmp_path: Path) -> None:
    out = changed(one, tmp_path / "changed")
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "awq"
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="already quantized"):
        read_checkpoint(out)


@needs_ggml
def test_ggml_refuses_them(packed: Packed, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"onnxruntime only|no type of ggml"):
        stem_edge.export_bundle(packed.folder, tmp_path / "out", engine="ggml", progress=False)


def test_devices_refuse_ranges_and_2_bits(bundle: Path) -> None:
    ranges = open_bundle(bundle).manifest.model.ranges
    why = (
        "matrices whose inputs round to the steps of a training run on the CPU only"
        if ranges
        else "matrices of 2 bits run on the CPU only"
    )
    with pytest.raises(BackendError, match=re.escape(f"for cpu: {why}; run it on the CPU")):
        load_fixed(bundle, device_memory="100MB")
