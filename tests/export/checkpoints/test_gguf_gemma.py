"""Gemma in GGUF files: the models of their folders, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from exact_models import off
from exports import refused
from gemma_folders import VOCAB_SIZE, write_tokenizer
from gguf_files import gemma_tokens, model_keys, model_tensors, write_file, write_model
from hf_folders import make_gemma, make_gemma3, make_gemma3n
from tiers import slow_but
from whole_model import forward

import stem_edge
from stem_edge.export.checkpoints.gguf import CONTEXT
from stem_edge.export.checkpoints.gguf_keys import ROPE_FACTORS, TABLE
from stem_edge.export.checkpoints.hugging_face.reader import read_checkpoint as read_hugging_face
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.export.tensor_files.tensor import Tensor
from stem_edge.graph.formats import EngineName
from stem_edge.numerics.distributions import divergence
from stem_edge.numerics.matrix import whole

SLIDING, FULL = "sliding_attention", "full_attention"
LINEAR = {
    SLIDING: {"rope_type": "default", "rope_theta": 100.0},
    FULL: {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
}
# Llama.cpp's factor of scores, which no key of Gemma 3 can change.
PLAIN = {"query_pre_attn_scalar": 16}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma3": (make_gemma3, PLAIN),
    "gemma3, linear, a cap": (
        make_gemma3, PLAIN | {"rope_parameters": LINEAR, "final_logit_softcapping": 2.0},
    ),
    "gemma3, head of its own": (make_gemma3, PLAIN | {"tie_word_embeddings": False}),
    "gemma3n": (make_gemma3n, {}),
    "gemma3n, nobody borrows": (
        make_gemma3n, {"num_kv_shared_layers": 0, "vocab_size_per_layer_input": 97},
    ),
    "gemma4": (make_gemma, {}),
    "gemma4, wide FFN": (make_gemma, {"use_double_wide_mlp": True}),
    "gemma4, K is V": (
        make_gemma,
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0},
    ),
    "gemma4, fewer rows": (make_gemma, {"vocab_size_per_layer_input": 90}),
    "gemma4, no rows": (
        make_gemma, {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    ),
}  # fmt: skip


def same(found: Mapping[Any, Tensor], expected: Mapping[Any, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for part, matrix in expected.items():
        np.testing.assert_array_equal(whole(found[part]), whole(matrix))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_that_of_its_folder(name: str, tmp_path: Path) -> None:
    make, changes = MODELS[name]
    model = make(**changes)
    model.save_pretrained(tmp_path)
    expected = read_hugging_face(tmp_path)
    found = read_checkpoint(write_model(tmp_path / "model.gguf", model))
    configs = [msgspec.structs.replace(one.config, layer_kinds=()) for one in (found, expected)]
    assert configs[0] == configs[1]
    assert found.names == expected.names
    for one, other in zip(found.config.layers, expected.config.layers, strict=True):
        assert math.isclose(one.sparsity, other.sparsity, abs_tol=1e-6)
        assert msgspec.structs.replace(one, sparsity=other.sparsity) == other
    same(found.backbone, expected.backbone)
    same(found.tables, expected.tables)
    if expected.index is not None:
        np.testing.assert_array_equal(found.index, expected.index)


IDS = np.random.default_rng(1).integers(97, size=40).tolist()
LAYERS_62 = {"num_hidden_layers": 62, "query_pre_attn_scalar": 8}  # of 27B, with its own factor


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [("gemma3", {}), ("gemma3", LAYERS_62), ("gemma4", {}), ("gemma4, K is V", {})],
)
def test_llama_cpp_computes_the_same(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Compare all three, so that files here mean what llama.cpp's converter writes."""
    llama_cpp = pytest.importorskip("llama_cpp")
    make, changes = MODELS[name]
    rows = {"vocab_size_per_layer_input": 310} if name != "gemma3" else {}
    model = make(**(changes | more | rows | {"vocab_size": 310}))
    path = write_model(tmp_path / "model.gguf", model)
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].numpy()
    read = read_checkpoint(path)
    assert off(forward(read.config, read.backbone, read.rows, IDS), expected) < 5e-4
    other = llama_cpp.Llama(
        str(path), n_ctx=64, logits_all=True, n_gpu_layers=0, n_threads=1, verbose=False
    )
    other.eval(IDS)
    found = np.array(other.scores[: len(IDS)])
    other.close()
    assert off(found, expected) < 0.2  # its keys, values and GELU are float16
    assert (found.argmax(1) == expected.argmax(1)).all()


KEYS: dict[str, tuple[str, dict[str, Any], str]] = {
    "experts": ("gemma4", {"expert_count": 8}, "gemma4.expert_count is 8; expected no such key"),
    "no layers": ("gemma3", {"block_count": 0}, ">= 1 - at `$.block_count`"),
    "layers": ("gemma4", {"block_count": 4_000_000_000}, "<= 256 - at `$.block_count`"),
    "more layers": ("gemma3", {"block_count": 8}, "no tensor blk.7.attn_norm.weight; check"),
    "fewer layers": ("gemma3", {"block_count": 6}, "tensor blk.6.attn_k.weight is not part"),
    "no heads": ("gemma3", {"attention.head_count": 0}, ">= 1 - at `$.attention.head_count`"),
    "a pattern": ("gemma4", {"attention.sliding_window_pattern": [True] * 3}, "3 values are given"),
    "a text": ("gemma3", {"attention.sliding_window_pattern": "x"}, "Expected `int | array`"),
    "widths": ("gemma4", {"feed_forward_length": [48] * 5}, "5 values are given for 6 layers"),
    "heads": ("gemma4", {"attention.head_count_kv": [2] * 7}, "7 values are given for 6 layers"),
    "no kv heads": ("gemma4", {"attention.head_count_kv": [0] * 6}, "wk is [32, 32], expected [64"),
    "values": ("gemma4", {"attention.value_length_swa": 8}, "value_length_swa is 8; expected 16"),
    "a part": ("gemma4", {"rope.dimension_count_swa": 8}, "dimension_count_swa is 8; expected 16"),
    "rotation": ("gemma4", {"rope.dimension_count": 8}, "rope.dimension_count is 8; expected 32"),
    "rows": ("gemma4", {"embedding_length_per_layer_input": 32}, "is [96, 32]; expected [192, 32]"),
    "no rows": ("gemma4", {"embedding_length_per_layer_input": 0}, "inp_gate.weight is not part"),
    "many rows": ("gemma4", {"embedding_length_per_layer_input": 1 << 31}, "ple_width"),
    "lenders": ("gemma4", {"attention.shared_kv_layers": 6}, "borrowed_kv_layers is 6 of 6"),
    "streams": ("gemma3n", {"altup.num_inputs": 3}, "altup_proj.weight is [3, 32, 32]; expected [2"),
    "no streams": ("gemma3n", {"altup.num_inputs": 0}, ">= 2 - at `$.altup_num_inputs`"),
    "the active": ("gemma3n", {"altup.active_idx": 4}, "active_stream is 4 and streams 4"),
    "sparsity": ("gemma3n", {"activation_sparsity_scale": [1.0] * 5}, "5 values are given for 6"),
    "all sparse": ("gemma3n", {"activation_sparsity_scale": [9.0] * 6}, "sparsity is 1.0; expected"),
    "not sparse": ("gemma3n", {"activation_sparsity_scale": [math.nan] * 6}, "activation_sparsity_scale has nan"),
    "epsilon": ("gemma3", {"attention.layer_norm_rms_epsilon": math.nan}, "norm_eps nan or"),
    "a cap": ("gemma3", {"final_logit_softcapping": math.inf}, "logit_softcap"),
    "two rotations": ("gemma4", {"rope.scaling.factor": 8.0}, "both rope.scaling and rope_freqs.we"),
    "yarn": ("gemma4", {"rope.scaling.type": "longrope"}, "longrope; expected none, linear or"),
}  # fmt: skip


@pytest.mark.parametrize("case", KEYS)
def test_keys_that_are_refused(case: str, tmp_path: Path) -> None:
    name, more, said = KEYS[case]
    model = MODELS[name][0](**MODELS[name][1])
    keys = model_keys(model.config) | {f"{name}.{key}": value for key, value in more.items()}
    path = write_file(tmp_path / "model.gguf", keys, model_tensors(model))
    refused(lambda: read_checkpoint(path), path, said)


def without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def shaped(name: str, *shape: int) -> Any:
    return lambda tensors: tensors.update({name: np.ones(shape, np.float32)})


TENSORS: dict[str, tuple[str, Any, str]] = {
    "no norm": ("gemma3", without("blk.3.attn_q_norm.weight"), "no tensor blk.3.attn_q_norm.weight; c"),
    "no table": ("gemma4", without(TABLE), f"no tensor {TABLE}"),
    "a short row": ("gemma4", shaped(TABLE, 97, 80), f"{TABLE} is [97, 80]; expected [97, 96]"),
    "many records": ("gemma4", shaped(TABLE, 98, 96), "ple_records is 98 of 97"),
    "a vector": ("gemma4", shaped(TABLE, 97), f"{TABLE} is [97]; expected [97, 96]"),
    "a stack": ("gemma4", shaped(TABLE, 97, 6, 16), f"{TABLE} is [97, 6, 16]; expected [97, 96]"),
    "no context": ("gemma4", without(CONTEXT), f"no tensor {CONTEXT}; check"),
    "context": ("gemma4", shaped(CONTEXT, 95, 32), f"{CONTEXT} is [95, 32]; expected [96, 32]"),
    "no gate": ("gemma4", without("blk.2.inp_gate.weight"), "no tensor blk.2.inp_gate.weight"),
    "no scale": ("gemma4", without("blk.1.layer_output_scale.weight"), "no tensor blk.1.layer_output_scale.weight"),
    "no keys": ("gemma4", without("blk.0.attn_k.weight"), "no tensor blk.0.attn_k.weight"),
    "no values": ("gemma3n", without("blk.0.attn_v.weight"), "no tensor blk.0.attn_v.weight"),
    "factors": ("gemma4", shaped(ROPE_FACTORS, 8), "factors other than Gemma 4's"),
    "other factors": (
        "gemma4", lambda t: t.update({ROPE_FACTORS: np.arange(1, 17, dtype=np.float32)}),
        "factors other than Gemma 4's",
    ),
    "no laurel": ("gemma3n", without("blk.0.laurel_l.weight"), "no tensor blk.0.laurel_l.weight"),
    "laurel": ("gemma3n", shaped("blk.1.laurel_l.weight", 8, 32), "laurel_in is [8, 32], expected"),
    "router": ("gemma3n", without("blk.4.altup_router.weight"), "no tensor blk.4.altup_router.weight"),
    "flat streams": ("gemma3n", shaped("altup_proj.weight", 96, 32), "is [96, 32]; expected [3, 32"),
    "no streams": ("gemma3n", without("altup_unembd_proj.weight"), "altup_unembd_proj.weight is mi"),
    "a tower": ("gemma3n", shaped("v.blk.0.attn_q.weight", 4, 4), "v.blk.0.attn_q.weight is not"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_are_missing_or_differ(case: str, tmp_path: Path) -> None:
    name, change, said = TENSORS[case]
    model = MODELS[name][0](**MODELS[name][1])
    tensors = model_tensors(model)
    change(tensors)
    path = write_file(tmp_path / "model.gguf", model_keys(model.config), tensors)
    refused(lambda: read_checkpoint(path), path, said)


# ---------------------------------------------------------------- exports

WIDE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size": 64,
    "intermediate_size": 96, "hidden_size_per_layer_input": 32,
}  # fmt: skip
# Type of the table -> type and group size of rows, and the greatest difference of a logit.
ROWS: dict[str, tuple[str, int]] = {
    "F32": ("int8", 32), "F16": ("int8", 32), "BF16": ("int8", 32), "Q8_0": ("int8", 32),
    "Q4_0": ("int4", 32), "Q5_1": ("int8", 32),
    **dict.fromkeys(("Q2_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"), ("int8", 128)),
    "Q3_K": ("int4", 16),  # whose values are the levels of 4 bits in blocks of 16
}  # fmt: skip


def wide_file(
    folder: Path, make: Any, types: Mapping[str, str], changes: Mapping[str, Any] = WIDE
) -> Path:
    """Write a model with a tokenizer; types: as write_model takes them."""
    write_tokenizer(folder)
    keys = gemma_tokens(folder, "gemma4")
    return write_model(folder / "model.gguf", make(**changes), types, more=keys)


@pytest.mark.parametrize("type", slow_but(["Q8_0", "Q4_0", "Q4_K"], ROWS))
@pytest.mark.parametrize("make", slow_but([make_gemma], [make_gemma, make_gemma3n]))
def test_rows_keep_their_codes(make: Any, type: str, tmp_path: Path) -> None:
    wide = {"hidden_size_per_layer_input": 32 if ROWS[type][1] == 32 else 128}
    path = wide_file(tmp_path, make, {TABLE: type}, WIDE | wide)  # a row is half a block
    bundle = stem_edge.export_bundle(path, tmp_path / "out", type="fp32", progress=False)
    layout, source = bundle.manifest.tables, read_checkpoint(path)
    assert layout is not None
    assert (layout.row_type, layout.group_size) == ROWS[type]
    exact = type in ("Q8_0", "Q4_0")
    assert layout.scale_type == ("fp16" if exact else "fp32")
    with stem_edge.open_tables(bundle.path) as tables:
        for layer, table in source.tables.items():
            found, values = tables[np.arange(len(whole(table))), layer], whole(table)
            assert off(found, values) <= (0 if exact else np.abs(values).max() / 127)
    ids = [*range(3, 40), 300]
    with stem_edge.load(bundle.path, progress=False) as model:
        expected = forward(source.config, source.backbone, source.rows, ids)
        assert not exact or off(model.logits(ids), expected) < 5e-4


MIXED = {
    "token_embd": "Q8_0", TABLE: "Q5_1", CONTEXT: "F16", "blk.1": "Q8_0", "altup": "F32",
    "blk": "Q4_0",
}  # fmt: skip
CODED = ("altup", "laurel")  # of Gemma 3n, whose rows are no whole blocks here


@pytest.mark.parametrize("name", slow_but(["gemma4"], ["gemma3", "gemma4", "gemma3n"]))
def test_matrices_keep_their_levels(name: str, engine: EngineName, tmp_path: Path) -> None:
    if name == "gemma3n" and engine == "ggml":
        pytest.skip("ggml has no such graphs")
    make, changes = MODELS[name]
    few = {f"blk.{layer}.{part}": "F32" for layer in range(6) for part in CODED}
    own = WIDE if name != "gemma3" else {k: v for k, v in WIDE.items() if "per_layer" not in k}
    path = wide_file(tmp_path, make, few | MIXED, own | changes)
    bundle = stem_edge.export_bundle(path, tmp_path / "out", engine=engine, progress=False)
    exact = stem_edge.export_bundle(path, tmp_path / "exact", type="fp32", progress=False)
    logits = []
    for one in (bundle, exact):
        with stem_edge.load(one.path, progress=False) as model:
            logits.append(model.logits([5, 9, 11, 300]))
    assert divergence(logits[1], logits[0]).mean() < 0.02
