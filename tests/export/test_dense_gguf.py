"""Dense models in llama.cpp: its logits and tokens against those of the reference model."""

from __future__ import annotations

import ctypes
import gc
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import SIZES, VARIANTS
from architectures import write as write_variant
from conformance import CASES, CONFORMANCE
from hf_folders import make_model as make_transformer
from make_checkpoint import Shape, write_checkpoint
from tokenizers import Tokenizer, models
from torch_model import random_tensors

from stem_edge.commands.main import main
from stem_edge.config import ModelConfig
from stem_edge.errors import BackendError, CheckpointError, ExportError
from stem_edge.export.backbone.gguf_llama import write_dense
from stem_edge.export.checkpoints.checkpoint import Checkpoint, TokenizerSource
from stem_edge.export.checkpoints.head_padding import HeadRows
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.export.dense_gguf import TokenizerDiffers, export_dense_gguf
from stem_edge.ggml.gguf_schema import gguf_name, tensor_types
from stem_edge.ggml.library import Ggml
from stem_edge.graph.formats import GgufType
from stem_edge.layers import Llama3Rope, YarnRope
from stem_edge.numerics.matrix import ArrayMatrix
from stem_edge.numerics.quantize import F32
from stem_edge.numerics.reference import forward

llama_cpp = pytest.importorskip("llama_cpp")
gguf = pytest.importorskip("gguf")

from stem_edge.export.random_dense import TYPES, random_dense
from stem_edge.measuring.bench.engine_llama import LlamaModel

pytestmark = pytest.mark.usefixtures("ggml")

TOLERANCE = 1e-3
HALVES: dict[str, Any] = {"rope_interleaved": False}
QK_NORM: dict[str, Any] = {"qk_norm_eps": SIZES["norm_eps"]}
MODELS: dict[str, dict[str, Any]] = {
    "pairs": {},
    "halves": HALVES,
    "halves, every head has its own keys": HALVES | {"n_kv_heads": 6},
    "own head_dim, tied head": HALVES | {"head_dim": 24, "tied_head": True},
    "linear": VARIANTS["RoPE, linear"],
    "llama3": VARIANTS["RoPE, llama3"],
    "llama3, halves, tied": HALVES | VARIANTS["RoPE, llama3"] | {"tied_head": True},
    "yarn": VARIANTS["RoPE, yarn"] | {"head_dim": 32},
    "yarn, a ramp of its own": HALVES
    | {"head_dim": 32, "rope_scaling": YarnRope(4, 16, 0.9, beta_fast=4.0, beta_slow=0.2)},
    "yarn between dimensions": {"rope_scaling": YarnRope(2, 16, 1.07, truncate=False)},
    "biases": {"biases": ("wq", "wk", "wv", "wo", "gate", "up", "down")},
    "q, k, v biases, halves": HALVES | {"biases": ("wq", "wk", "wv")},
    "a bias of k alone": HALVES | {"biases": ("wk",)},
    "q and k norm": HALVES | QK_NORM,
    "q and k norm, pairs, biases": QK_NORM | {"biases": ("wq", "wk", "wv")},
    "q and k norm, yarn": HALVES | QK_NORM | VARIANTS["RoPE, yarn"],
    "a window as long as the context": {"sliding_window": 64},
}


def dense(fields: dict[str, Any]) -> ModelConfig:
    return ModelConfig(**(SIZES | fields | {"stem_layers": ()}))


def random_checkpoint(config: ModelConfig) -> Checkpoint:
    """Make a checkpoint of random values that are exact in float16."""
    tensors, _ = random_tensors(config, 0)
    backbone: Any = {n: ArrayMatrix(t.half().float().numpy()) for n, t in tensors.items()}
    return Checkpoint(
        Path("random"), config, backbone, {}, TokenizerSource("bytes", None, add_bos=True)
    )


def agree(checkpoint: Checkpoint, path: Path, prompt: list[int], steps: int = 8) -> F32:
    """Compare logits of a prompt token by token and at once, and tokens that follow it greedily.

    Returns the reference model's logits.
    """
    expected = forward(checkpoint.config, checkpoint.backbone, checkpoint.rows, prompt)
    model = LlamaModel(path, 128, 1, exact=True)
    found = np.stack([model.process([token]).copy() for token in prompt])
    assert np.abs(found - expected).max() < TOLERANCE
    model.clear()
    logits, ids, ours = model.process(prompt), list(prompt), list(prompt)
    assert np.abs(logits - expected[-1]).max() < TOLERANCE
    for _ in range(steps):
        ids.append(int(logits.argmax()))
        logits = model.process(ids[-1:])
        ours.append(int(forward(checkpoint.config, checkpoint.backbone, {}, ours)[-1].argmax()))
    assert ids == ours
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_gives_the_reference_models_tokens(name: str, tmp_path: Path) -> None:
    folder, ids, expected = write_variant(tmp_path / "checkpoint", dense(MODELS[name]))
    out = export_dense_gguf(folder, tmp_path / "model.gguf", backbone="f32")
    assert out == tmp_path / "model.gguf"
    assert np.abs(agree(read_checkpoint(folder), out, ids) - expected).max() < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["llama, MHA, tied", "llama, llama3", "llama, biases", "qwen2", "qwen3"]
)
def test_models_of_transformers(name: str, tmp_path: Path) -> None:
    model = make_transformer(name)
    model.save_pretrained(tmp_path / "model")
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "t.json"))
    with pytest.warns(TokenizerDiffers, match=r"model\.gguf: .* not text"):
        out = export_dense_gguf(
            tmp_path / "model",
            tmp_path / "model.gguf",
            backbone="f32",
            tokenizer=tmp_path / "t.json",
        )
    ids = np.random.default_rng(1).integers(97, size=40).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    found = agree(read_checkpoint(tmp_path / "model"), out, ids)
    assert np.abs(found - expected).max() < TOLERANCE


@pytest.mark.parametrize("tied", [True, False])
def test_models_of_the_stem_trainer(tied: bool, tmp_path: Path) -> None:
    shape = Shape(stem_layers=(), tied_head=tied)
    folder = write_checkpoint(tmp_path / "checkpoint", shape, layout="consolidated")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = export_dense_gguf(folder, tmp_path / "model.gguf", backbone="f32")
    agree(read_checkpoint(folder), out, [256, 84, 104, 101, 32, 99])
    names = {tensor.name for tensor in gguf.GGUFReader(out).tensors}
    assert ("output.weight" in names) != tied


# Mean difference over mean magnitude of the logits; of a model that computes something else, 1.4.
STAYS_WITHIN: dict[GgufType, float] = {
    "f16": 0.005,
    "q8_0": 0.1,
    "q6_k": 0.2,
    "q5_k_m": 0.35,
    "q4_k_m": 0.55,
    "q4_0": 0.6,
}


@pytest.mark.slow
@pytest.mark.parametrize("backbone", STAYS_WITHIN)
def test_quantized_models_stay_close(backbone: GgufType, ggml: Ggml, tmp_path: Path) -> None:
    config = dense(HALVES | {"dim": 256, "d_ff": 512, "head_dim": 32, "n_heads": 8})
    checkpoint = random_checkpoint(config)
    tokenizer = {"tokenizer.ggml.model": "no_vocab"}
    write_dense(tmp_path / "m.gguf", ggml, checkpoint, backbone, tokenizer, threads=2)
    ids = np.random.default_rng(1).integers(260, size=30).tolist()
    expected = forward(config, checkpoint.backbone, {}, ids)
    model = LlamaModel(tmp_path / "m.gguf", 64, 1)
    found = np.stack([model.process([token]).copy() for token in ids])
    difference = np.abs(found - expected).mean() / np.abs(expected).mean()
    assert difference < STAYS_WITHIN[backbone]


MIXED: dict[str, dict[str, Any]] = {
    "wide": {"dim": 256, "n_layers": 9, "d_ff": 512},
    "wide, tied": {"dim": 256, "n_layers": 3, "d_ff": 768, "tied_head": True},
    "narrow": {"dim": 96, "n_layers": 8, "d_ff": 160, "n_heads": 6, "head_dim": 16},
    "narrow, tied, q and k norm": HALVES | QK_NORM | {"dim": 64, "d_ff": 256, "tied_head": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("weights", ["q4_0", "q4_k_m", "q5_k_m", "q6_k", "q8_0"])
def test_files_are_those_that_llama_cpp_quantizes(
    name: str, weights: GgufType, ggml: Ggml, tmp_path: Path
) -> None:
    """Types and bytes of all tensors are equal."""
    config = dense(MIXED[name])
    checkpoint, tokenizer = random_checkpoint(config), {"tokenizer.ggml.model": "no_vocab"}
    ours, half, theirs = (tmp_path / f"{which}.gguf" for which in ("ours", "half", "theirs"))
    write_dense(ours, ggml, checkpoint, weights, tokenizer)
    write_dense(half, ggml, checkpoint, "f16", tokenizer)
    LlamaModel(half, 64, 1)  # because loading a model silences llama.cpp
    params = llama_cpp.llama_model_quantize_default_params()
    kinds = {"q4_0": "Q4_0", "q8_0": "Q8_0", "q6_k": "Q6_K", "q5_k_m": "Q5_K_M", "q4_k_m": "Q4_K_M"}
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kinds[weights]}")
    params.nthread = 1
    status = llama_cpp.llama_model_quantize(
        str(half).encode(), str(theirs).encode(), ctypes.byref(params)
    )
    assert status == 0
    found, expected = gguf.GGUFReader(ours), gguf.GGUFReader(theirs)
    assert {t.name: t.tensor_type.name for t in found.tensors} == {
        t.name: t.tensor_type.name for t in expected.tensors
    }
    values = {t.name: t.data for t in expected.tensors}
    for tensor in found.tensors:
        assert np.array_equal(tensor.data, values[tensor.name]), tensor.name
    for key in ("general.file_type", "general.quantization_version"):
        assert found.fields[key].contents() == expected.fields[key].contents()
    chosen = tensor_types(config, weights)
    names = {gguf_name(part): type.name for part, type in chosen.items()}
    assert names == {t.name: t.tensor_type.name for t in found.tensors}


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"biases": ("up", "head")}, "biases of head"),
        (QK_NORM | {"biases": ("wo",)}, "biases of wo, .*qwen3 models do not"),
        ({"qk_norm_eps": 1e-2}, "epsilon 0.01 beside others of 1e-05"),
        ({"post_norms": True}, "norms after attention and FFN"),
        ({"logit_softcap": 3.0}, "logit_softcap of 3.0"),
        ({"sliding_window": 5, "window_layers": (1,)}, "sliding_window of 5"),
        (QK_NORM | {"rope_scaling": Llama3Rope(8, 1, 4, 16)}, "RoPE scaled by factors"),
    ],
)
def test_what_llama_cpp_has_not_is_refused(
    fields: dict[str, Any], found: str, tmp_path: Path
) -> None:
    folder, _, _ = write_variant(tmp_path / "checkpoint", dense(fields))
    with pytest.raises(ExportError, match=rf"checkpoint: has .*{found}"):
        export_dense_gguf(folder, tmp_path / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("case", CASES)
def test_stem_models_are_refused(case: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"STEM layers \(.* as a bundle: stem-edge export"):
        export_dense_gguf(CONFORMANCE / case, tmp_path / "out.gguf")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = dense({"dim": 64, "d_ff": 64, "n_layers": 1})
    return write_variant(tmp_path_factory.mktemp("small") / "checkpoint", config)[0]


def test_a_calibration_text_changes_the_codes(folder: Path, tmp_path: Path) -> None:
    ids = tmp_path / "ids.npy"
    np.save(ids, np.random.default_rng(0).integers(0, 260, 600))
    files = {
        tokens: export_dense_gguf(
            folder,
            tmp_path / f"{tokens}.gguf",
            backbone="q4_0",
            calibration=ids if tokens else None,
            calibration_tokens=tokens or None,
        )
        for tokens in (0, 50, 500)
    }
    assert len({path.read_bytes() for path in files.values()}) == 3
    assert len({path.stat().st_size for path in files.values()}) == 1


def test_the_file_says_what_it_is(folder: Path, tmp_path: Path) -> None:
    out = export_dense_gguf(folder, tmp_path / "deep" / "m.gguf", backbone="f16", threads=1)
    fields = {k: f.contents() for k, f in gguf.GGUFReader(out).fields.items()}
    expected = {
        "general.architecture": "llama",
        "general.name": "checkpoint",
        "general.file_type": 1,
        "llama.vocab_size": 260,
        "llama.context_length": 64,
        "llama.attention.head_count_kv": 2,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.bos_token_id": 256,
    }
    assert {key: fields[key] for key in expected} == expected
    assert not any(key.startswith("stem.") for key in fields)


def test_a_file_is_replaced_only_by_force_and_only_a_gguf_file(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "m.gguf"
    export_dense_gguf(folder, out, backbone="f32")
    before = out.read_bytes()
    with pytest.raises(ExportError, match=r"m\.gguf: already exists; .*--force"):
        export_dense_gguf(folder, out)
    assert out.read_bytes() == before
    assert export_dense_gguf(folder, out, backbone="f16", force=True).read_bytes() != before
    out.write_text("my letters")
    with pytest.raises(ExportError, match="is not a GGUF file"):
        export_dense_gguf(folder, out, force=True)
    assert out.read_text() == "my letters"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_nothing_is_left_behind(
    error: BaseException, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "m.gguf"
    export_dense_gguf(folder, out, backbone="f32")
    before = out.read_bytes()

    def interrupted(path: Path, *args: Any, **options: Any) -> None:
        write_dense(path, *args, **options)
        raise error

    monkeypatch.setattr("stem_edge.export.dense_gguf.write_dense", interrupted)
    with pytest.raises((KeyboardInterrupt, ExportError)):
        export_dense_gguf(folder, out, force=True)
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]


def test_leftovers_of_a_killed_export_do_not_matter(folder: Path, tmp_path: Path) -> None:
    for name in (".stem-edge-m.gguf", ".stem-edge-m.gguf.lock"):
        (tmp_path / name).write_text("half")
    out = export_dense_gguf(folder, tmp_path / "m.gguf", backbone="f32")
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"backbone": "q3_k"}, "backbone is 'q3_k'; expected one of f32"),
        ({"backbone": "f16", "calibration": "text"}, "f16 needs none"),
        ({"threads": 0}, "threads is 0"),
    ],
)
def test_options_that_do_not_fit(
    options: dict[str, Any], found: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=found):
        export_dense_gguf(folder, tmp_path / "m.gguf", **options)


def test_values_that_are_not_finite(folder: Path, ggml: Ggml, tmp_path: Path) -> None:
    checkpoint = random_checkpoint(dense(HALVES))
    wk = checkpoint.backbone["layers.1.wk"].rows(0, 16).copy()
    wk[3] = np.nan
    broken: Any = {**checkpoint.backbone, "layers.1.wk": ArrayMatrix(wk)}
    with pytest.raises(CheckpointError, match=r"blk\.1\.attn_k"):
        write_dense(tmp_path / "m", ggml, replace(checkpoint, backbone=broken), "f32", {})


def test_any_rows_of_turned_heads() -> None:
    matrix = np.arange(24 * 3, dtype=np.float32).reshape(24, 3)
    turned = HeadRows(ArrayMatrix(matrix), np.array([0, 3, 1, 4, 2, 5]))
    whole = turned.rows(0, 24)
    assert whole[:7, 0].tolist() == [0, 9, 3, 12, 6, 15, 18]
    for start, stop in ((0, 1), (5, 6), (5, 13), (6, 12), (23, 24)):
        assert np.array_equal(turned.rows(start, stop), whole[start:stop])
    vector = HeadRows(ArrayMatrix(matrix[:12, 0]), np.array([1, 0]))
    assert vector.rows(1, 3).tolist() == [0, 9]


@pytest.mark.slow
def test_models_of_random_weights_for_bench(tmp_path: Path) -> None:
    sizes = {"dim": 256, "d_ff": 256, "n_heads": 8, "head_dim": 32}
    config = ModelConfig(**(SIZES | VARIANTS["all at once"] | sizes))
    found = {}
    for kind in TYPES:
        path = random_dense(tmp_path, config, kind, 2)
        assert random_dense(tmp_path, config, kind, 2) == path
        model = LlamaModel(path, 32, 1)
        assert model.vocab_size == 260
        assert np.isfinite(model.process([1, 2, 3])).all()
        found[kind] = {t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
    assert found["Q4_0-pure"] == {"F32", "Q4_0"}
    assert found["Q4_0"] == {"F32", "Q4_0", "Q6_K"}
    assert found["Q4_K_M"] == {"F32", "Q4_K", "Q6_K"}
    assert len(list(tmp_path.iterdir())) == len(TYPES)


def test_a_model_is_freed_with_its_last_reference(folder: Path, tmp_path: Path) -> None:
    out = export_dense_gguf(folder, tmp_path / "m.gguf", backbone="f32")
    model = LlamaModel(out, 32, 1)
    gone, mapped = weakref.ref(model), Path("/proc/self/maps")
    if mapped.exists():
        assert str(out) in mapped.read_text()
    del model
    gc.collect()
    assert gone() is None
    if mapped.exists():
        assert str(out) not in mapped.read_text()


def test_an_invalid_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(BackendError, match=r"cannot load .*m\.gguf"):
        LlamaModel(tmp_path / "m.gguf", 32, 1)


def test_the_command_writes_an_ordinary_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", Shape(stem_layers=()))
    out = tmp_path / "model.gguf"
    command = ["export", str(checkpoint), str(out), "--engine", "llama.cpp", "--backbone", "f16"]
    assert main(command) == 0
    assert str(out) in capsys.readouterr().out
    assert out.read_bytes()[:4] == b"GGUF"
    assert main(command) == 1
    assert "already exists" in capsys.readouterr().err
    assert main([*command, "--force", "--tables", "int8"]) == 1
    assert "--tables is for bundles" in capsys.readouterr().err
