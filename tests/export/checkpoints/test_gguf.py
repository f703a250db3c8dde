"""Models in GGUF files: the same as the originals, and what is refused."""

from __future__ import annotations

import ctypes
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import onnxruntime as ort
import pytest
from exports import refused
from gguf_files import coded, model_keys, model_tensors, write_file, write_model
from hf_folders import SIZES, make_model
from tiers import slow_but
from transformers import LlamaConfig, LlamaForCausalLM

import stem_edge
from stem_edge.bundle.manifest import MANIFEST
from stem_edge.commands.main import main
from stem_edge.errors import BundleError, InputError
from stem_edge.export import exporter
from stem_edge.export.checkpoints.gguf_keys import ROPE_FACTORS, frequency_factors
from stem_edge.export.checkpoints.hugging_face.reader import read_checkpoint as read_hugging_face
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.export.job import plan
from stem_edge.export.job.plan import plan_of
from stem_edge.export.job.recipe import Recipe
from stem_edge.export.job.stored_types import keep_stored_types
from stem_edge.graph.formats import GGUF, GGUF_TYPES, EngineName, GgufType
from stem_edge.layers import LinearRope, Llama3Rope, Rope
from stem_edge.numerics.distributions import divergence
from stem_edge.numerics.matrix import whole

SCALING: dict[str, dict[str, Any]] = {
    "llama, linear": {"rope.scaling.type": "linear", "rope.scaling.factor": 3.0},
    "qwen3, biases, tied": {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    },
    "mistral, window": {"attention.sliding_window": 5},
}
MODELS = [
    *("llama", "llama, MHA, tied", "llama, one kv head", "llama, biases", "llama, linear"),
    *("mistral", "mistral, window", "qwen2", "qwen3", "qwen3, biases, tied"),
]
WIDE: dict[str, Any] = SIZES | {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
}  # fmt: skip
# Rows of whole blocks of 256, and rows for which llama.cpp falls back to types of 32.
MIXED_SIZES: list[dict[str, Any]] = [
    {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 9},
    {"hidden_size": 64, "intermediate_size": 256, "tie_word_embeddings": True},
]


def more_keys(name: str, kind: str) -> dict[str, Any]:
    return {f"{kind}.{key}": value for key, value in SCALING.get(name, {}).items()}


def wide_model(**changes: Any) -> Any:
    """Make a model whose matrices have whole blocks of 32 values."""
    return LlamaForCausalLM(LlamaConfig(**(WIDE | changes)))


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_that_of_its_folder(name: str, tmp_path: Path) -> None:
    model = make_model(name)
    model.save_pretrained(tmp_path)
    expected = read_hugging_face(tmp_path)
    kind = model_keys(model.config)["general.architecture"]
    path = write_model(tmp_path / "model.gguf", model, more=more_keys(name, kind))
    found = read_checkpoint(path)
    assert (found.path, found.config, found.names) == (path, expected.config, expected.names)
    assert found.backbone.keys() == expected.backbone.keys()
    for part, matrix in expected.backbone.items():
        np.testing.assert_array_equal(whole(found.backbone[part]), whole(matrix))


def test_the_factors_of_llama_3(tmp_path: Path) -> None:
    model = make_model("llama, own head_dim")
    scaling = Llama3Rope(8.0, 1.0, 4.0, 8192)
    factors = frequency_factors(Rope(24, 5e5, scaling))
    tensors: dict[str, Any] = dict(model_tensors(model))
    keys = model_keys(model.config) | {"llama.rope.freq_base": 5e5}
    path = write_file(tmp_path / "a.gguf", keys, tensors | {ROPE_FACTORS: factors})
    assert read_checkpoint(path).config.rope_scaling == scaling
    tensors[ROPE_FACTORS] = np.arange(12, dtype=np.float32)
    other = write_file(tmp_path / "b.gguf", keys, tensors)
    refused(lambda: read_checkpoint(other), other, "factors other than those of Llama 3.1")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"rope.scaling.factor": 8.0}, LinearRope(8.0)),
        ({"rope.scale_linear": 8.0}, LinearRope(8.0)),
        ({"rope.scale_linear": 8.0, "rope.scaling.type": "linear"}, LinearRope(8.0)),
        ({"rope.scaling.factor": 8.0, "rope.scaling.type": "none"}, None),
        ({"rope.scaling.factor": 0.0, "rope.scaling.type": "linear"}, None),
    ],
)
def test_factors_of_rope_count_as_in_llama_cpp(
    more: dict[str, Any], expected: LinearRope | None, tmp_path: Path
) -> None:
    added = {f"llama.{key}": value for key, value in more.items()}
    path = write_model(tmp_path / "model.gguf", make_model("llama"), more=added)
    assert read_checkpoint(path).config.rope_scaling == expected


KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general.architecture": "gemma2"}, "'gemma2'; expected one of llama, qwen2"),
    "an adapter": ({"general.type": "adapter"}, "general.type is 'adapter'; expected 'model'"),
    "experts": ({"llama.expert_count": 8}, "llama.expert_count is 8; expected no such key"),
    "no layers": ({"llama.block_count": 0}, ">= 1 - at `$.block_count`"),
    "layers": ({"llama.block_count": 4_000_000_000}, "<= 256 - at `$.block_count`"),
    "more layers": ({"llama.block_count": 4}, "no tensor blk.3.attn_norm.weight; check"),
    "fewer layers": ({"llama.block_count": 2}, "tensor blk.2.attn_k.weight is not part of the"),
    "sizes of layers": ({"llama.feed_forward_length": [48, 48, 9]}, "Expected `int`, got `array`"),
    "a text": ({"llama.rope.freq_base": "big"}, "Expected `float`, got `str`"),
    "part of a head": ({"llama.rope.dimension_count": 4}, "rope.dimension_count is 4; expected 8"),
    "no order": ({"llama.attention.causal": False}, "attention.causal is False; expected"),
    "values": ({"llama.attention.value_length": 16}, "attention.value_length is 16; expected 8"),
    "longrope": ({"llama.rope.scaling.type": "longrope"}, "longrope; expected none, linear or"),
    "a factor": ({"llama.rope.scaling.attn_factor": 0.5}, "attn_factor is not 1, which the type"),
    "width": ({"llama.embedding_length": 64}, "tensors and configuration disagree: embedding"),
    "context": ({"llama.context_length": 1 << 31}, "max_context is 2147483648; expected"),
    "epsilon": ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "norm_eps nan or"),
}


@pytest.mark.parametrize("case", KEYS)
def test_models_that_are_not_known_are_refused(case: str, tmp_path: Path) -> None:
    model, (more, said) = make_model("llama"), KEYS[case]
    keys = model_keys(model.config) | more
    path = write_file(tmp_path / "model.gguf", keys, model_tensors(model))
    refused(lambda: read_checkpoint(path), path, said)


# ---------------------------------------------------------------- exports


def test_an_export_for_onnxruntime_has_the_files_values(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", wide_model(), "Q4_1")
    source = read_checkpoint(path)
    bundle = stem_edge.export_bundle(path, tmp_path / "out", type="fp32", progress=False)
    assert bundle.manifest.model == source.config
    assert bundle.manifest.report.divergence < 1e-7


# Types of matrices -> weights, embedding, head, offsets, and products with another type.
KEPT: dict[str, tuple[dict[str, str], tuple[Any, ...]]] = {
    "8 bits": ({"": "Q8_0"}, ("int8", "int8", "int8", False, {})),
    "4 bits": ({"": "Q4_0"}, ("int4", "int4", "int4", False, {})),
    "offsets": ({"": "Q4_1"}, ("int4", "int8", "int4", True, {})),
    "of all": (
        {"blk.1.attn_v": "Q8_0", "blk.0.attn_q": "Q8_0", "token_embd": "Q8_0", "output": "Q4_0",
         "blk.0": "Q4_0", "": "Q4_1"},
        ("int4", "int8", "int4", True, {"layers.0.qkv": "int8", "layers.1.v": "int8"}),
    ),
    "5 bits": ({"": "Q5_1"}, ("int8", "int8", "int8", False, {})),
}  # fmt: skip


@pytest.mark.parametrize("case", slow_but(["5 bits", "of all"], KEPT))
def test_onnxruntime_keeps_the_levels_of_blocks(case: str, tmp_path: Path) -> None:
    types, expected = KEPT[case]
    path = write_model(tmp_path / "model.gguf", wide_model(), types)
    bundle = stem_edge.export_bundle(path, tmp_path / "out", prefill_graph=False, progress=False)
    backbone = bundle.manifest.backbone
    assert backbone is not None and (backbone.quantizer, backbone.block_size) == ("rtn", 32)
    found = backbone.weights, backbone.type_of("embedding"), backbone.head, backbone.offsets
    assert (*found, backbone.matrices) == expected
    with stem_edge.load(bundle.path, progress=False) as model:
        logits = model.logits([5, 9, 11])
    exact = stem_edge.export_bundle(path, tmp_path / "exact", type="fp32", progress=False)
    with stem_edge.load(exact.path, progress=False) as model:
        assert divergence(model.logits([5, 9, 11]), logits).mean() < 1e-3


@pytest.mark.parametrize("type", ["small", "balanced", "near-lossless", "int4", "fp32"])
def test_types_that_are_asked_for_go_first(type: str, tmp_path: Path) -> None:
    source = read_checkpoint(write_model(tmp_path / "model.gguf", wide_model(), "Q4_1"))
    options = Recipe(type=type)
    assert keep_stored_types(source, options) == plan_of(source, options)


@pytest.mark.usefixtures("ggml")
@pytest.mark.parametrize("engine", ["onnxruntime", "ggml"])
def test_what_is_kept_is_compared_only_if_a_text_is_given(
    engine: EngineName,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, text = write_model(tmp_path / "model.gguf", wide_model(), "Q4_1"), tmp_path / "ids.npy"
    np.save(text, np.arange(299) % 256)
    command, packed = ["export", str(path), "--engine", engine], list[object]()

    class Seen(ort.InferenceSession):  # type: ignore[misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            packed.append(given)
            super().__init__(*given, **named)

    monkeypatch.setattr(ort, "InferenceSession", Seen)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(exporter, "observe")
        assert main([*command, str(tmp_path / "kept")]) == 0
    assert capsys.readouterr().out.count("kept as stored") == 2
    assert not packed
    assert main([*command, str(tmp_path / "judged"), "--calibration", str(text)]) == 0
    assert bool(packed) == (engine == "onnxruntime")
    reports = []
    for name in ("kept", "judged"):
        manifest = stem_edge.open_bundle(tmp_path / name).manifest
        reports.append((len(manifest.report.probe_tokens), manifest.report.agreement is None))
        assert manifest.backbone is None or manifest.backbone.kv_peaks == (name == "judged")
        assert not manifest.has_prefill
    assert reports == [(0, True), (SIZES["max_position_embeddings"], False)]
    if engine == "onnxruntime":
        with pytest.raises(InputError, match="--calibration FILE"):
            stem_edge.load(tmp_path / "kept", kv="int8")


MIXED = {"blk.1.attn_v": "Q8_0", "token_embd": "Q5_1", "output": "F16", "": "Q4_1"}


@pytest.mark.usefixtures("ggml")
def test_matrices_keep_their_codes_on_ggml(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", wide_model(), MIXED)
    bundle = stem_edge.export_bundle(path, tmp_path / "out", engine="ggml", progress=False)
    kept = bundle.manifest.gguf
    assert kept is not None and isinstance(kept.weights, dict)
    assert kept.weights == {
        "embedding": "Q5_1",
        "head": "F16",
        "layers.1.wv": "Q8_0",
        **dict.fromkeys(("wq", "wk", "wv", "wo", "gate", "up", "down"), "Q4_1"),
    }
    compare_codes(path, bundle.path / GGUF)
    with stem_edge.load(bundle.path, progress=False) as model:
        assert model.logits([1, 2, 3]).shape == (3, 300)


@pytest.mark.usefixtures("ggml")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gate": "Q9_9"}, "layers.0.gate [96, 64] cannot be Q9_9"),
        ({"gate": "Q4_K"}, "layers.0.gate [96, 64] cannot be Q4_K"),
        ({"layers.1.up": "F64"}, "layers.1.up [96, 64] cannot be F64"),
        ({"norm": "F16"}, "types of 'norm', which the model has not"),
        ({"layers.9.up": "F16"}, "types of 'layers.9.up', which the model has not"),
        ({"gate": None}, "layers.0.gate [96, 64] cannot be of no type"),
        ({"gate": 4}, "Expected `str`, got `int`"),
        ({"gate": "Q8_0"}, "bytes found; expected a header and"),
        ({"wq": "Q4_0", "wk": "Q4_0"}, "its header lists other tensors"),
    ],
)
def test_a_manifest_with_other_types_is_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "model.gguf", wide_model(), MIXED)
    bundle = stem_edge.export_bundle(path, tmp_path / "out", engine="ggml", progress=False)
    manifest = json.loads((bundle.path / MANIFEST).read_text())
    types = manifest["gguf"]["weights"] | change
    manifest["gguf"]["weights"] = {key: kind for key, kind in types.items() if kind is not None}
    (bundle.path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=re.escape(said)):
        stem_edge.open_bundle(bundle.path)


def compare_codes(path: Path, out: Path, dim: int = WIDE["hidden_size"]) -> None:
    """Check that a backbone has the rows of the file, those of q and k in the order of halves."""
    before, after = ({t.name: t for t in gguf.GGUFReader(p).tensors} for p in (path, out))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].tensor_type == tensor.tensor_type
        rows = tensor.data.reshape(tensor.shape[-1] if len(tensor.shape) > 1 else 1, -1)
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            size = dim // WIDE["num_attention_heads"]
            heads = rows.reshape(-1, size // 2, 2, rows.shape[1])
            rows = heads.swapaxes(1, 2).reshape(rows.shape)
        np.testing.assert_array_equal(after[name].data.reshape(rows.shape), rows)


@pytest.mark.slow
@pytest.mark.usefixtures("ggml")
@pytest.mark.parametrize("sizes", MIXED_SIZES, ids=str)
@pytest.mark.parametrize("mixture", ["q4_0", "q4_k_m", "q5_k_m", "q6_k", "q8_0"])
def test_mixtures_have_the_types_and_bytes_of_llama_cpp(
    mixture: GgufType, sizes: dict[str, Any], tmp_path: Path
) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    path, theirs = tmp_path / "model.gguf", tmp_path / "theirs.gguf"
    write_model(path, wide_model(**sizes))
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{mixture.upper()}")
    params.nthread = 1
    names = (str(path).encode(), str(theirs).encode())
    assert llama_cpp.llama_model_quantize(*names, ctypes.byref(params)) == 0
    with pytest.MonkeyPatch.context() as patch:  # otherwise a text weights the channels
        patch.setattr(plan, "UNWEIGHTED", GGUF_TYPES)
        bundle = stem_edge.export_bundle(path, tmp_path / "out", engine="ggml", type=mixture)
    compare_codes(theirs, bundle.path / GGUF, sizes["hidden_size"])


@pytest.mark.usefixtures("ggml")
def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    model = wide_model()
    tensors: dict[str, Any] = dict(model_tensors(model))
    codes = coded(tensors["blk.0.ffn_up.weight"], "Q8_0")
    codes[5, :2] = 0x7E  # the scale of its first block: NaN
    tensors["blk.0.ffn_up.weight"] = codes, "Q8_0"
    whole_file = write_model(tmp_path / "good.gguf", model)
    keys = {
        field.name: field.contents()
        for field in gguf.GGUFReader(whole_file).fields.values()
        if not field.name.startswith("GGUF.")
    }
    path = write_file(tmp_path / "model.gguf", keys, tensors)
    engines: tuple[EngineName, ...] = ("onnxruntime", "ggml")
    for engine in engines:
        out = tmp_path / engine
        export = partial(stem_edge.export_bundle, path, out, engine=engine, progress=False)
        refused(export, "NaN")
        assert not out.exists()
    assert read_checkpoint(path).backbone["layers.0.up"].stored is not None
