"""backbone.gguf and the manifest beside it: whatever differs is named."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from gguf_files import (
    BOOL,
    FLOAT32,
    FLOAT64,
    UINT32,
    array,
    backbone,
    backbone_keys,
    backbone_tensors,
    number,
    strings,
    text,
)
from test_config import config

from stem_edge import gguf_check
from stem_edge.bundle import (
    BACKBONE_DATA,
    GGUF,
    TABLES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    FileEntry,
    Manifest,
    QualityReport,
)
from stem_edge.config import ModelConfig
from stem_edge.errors import BundleError
from stem_edge.formats import GGUF_TYPES, BackboneFormat, GgufFormat, GgufType
from stem_edge.ggml_types import F16, F32, Q5_0, TensorType
from stem_edge.gguf_check import check_backbone
from stem_edge.gguf_file import GgufFile, read_gguf
from stem_edge.gguf_schema import model_metadata
from stem_edge.graph_io import decode_graphs, graph_file
from stem_edge.rows import RecordLayout

Tensors = dict[str, tuple[tuple[int, ...], TensorType] | None]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / GGUF


def read(path: Path, data: bytes) -> GgufFile:
    path.write_bytes(data)
    return read_gguf(path)


def manifest_of(model: ModelConfig, weights: GgufType | None = "q4_k_m") -> Manifest:
    """With a backbone for ggml; without weights: for onnxruntime."""
    names = [
        GGUF,
        TOKENIZER,
        TOKENIZER_CONFIG,
        BACKBONE_DATA,
        *map(graph_file, decode_graphs(model)),
    ]
    tables = None
    if model.stem_layers:
        names += [f"{TABLES}/zarr.json", f"{TABLES}/records/zarr.json", f"{TABLES}/records/c/0/0"]
        tables = RecordLayout(
            records=model.records,
            layers=model.stem_layers,
            parts=model.row_parts(),
            row_type="int8",
            group_size=16,
        )
    report = QualityReport(
        checkpoint_nbytes=1,
        backbone_nbytes=1,
        tables_nbytes=0,
        errors={},
        probe_tokens=(),
        worst_logit_difference=0.0,
        greatest_logit=1.0,
        divergence=0.0,
    )
    return Manifest(
        format_version=3,
        model=model,
        backbone=None if weights else BackboneFormat(weights="fp32", head="fp32", block_size=32),
        gguf=GgufFormat(weights=weights) if weights else None,
        tables=tables,
        files=dict.fromkeys(names, FileEntry(1, "0" * 64)),
        reports={"ggml" if weights else "onnxruntime": report},
    )


STEM = config(dim=32, d_ff=64, head_dim=16, biases=("wq",), rope_theta=500000.1, norm_eps=1e-6)
DENSE = config(dim=32, d_ff=64, head_dim=16, stem_layers=(), tied_head=True)
LOW_RANK = config(dim=256, d_ff=512, row_rank=32, qk_norm_eps=1e-6, post_norms=True, n_layers=9)


@pytest.mark.parametrize("weights", GGUF_TYPES)
@pytest.mark.parametrize("model", [STEM, DENSE, LOW_RANK], ids=["stem", "dense", "low-rank"])
def test_a_backbone(file: Path, model: ModelConfig, weights: GgufType) -> None:
    manifest = manifest_of(model, weights)
    keys = backbone_keys(manifest)
    check_backbone(read(file, backbone(keys, backbone_tensors(manifest))), manifest)
    del keys["general.alignment"]  # 32 without it
    keys |= {"general.quantization_version": number(UINT32, 2), "tokenizer.x": text("y")}
    check_backbone(read(file, backbone(keys, backbone_tensors(manifest))), manifest)


def unlike(path: Path, keys: dict[str, bytes], changes: Tensors, manifest: Manifest) -> str:
    """The message about a file with these keys and other tensors; None: without the tensor."""
    tensors = backbone_tensors(manifest)
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    found = read(path, backbone(keys, tensors))
    with pytest.raises(BundleError) as caught:
        check_backbone(found, manifest)
    message = str(caught.value)
    assert message.startswith(f"{path}: not the backbone that the bundle's manifest describes (")
    assert message.endswith("stem-edge export CHECKPOINT OUT --engine gguf")
    assert message.isprintable()
    return message


OTHER_KEYS: list[tuple[str, bytes | None, str]] = [
    ("general.architecture", None, "general.architecture is missing"),
    ("general.architecture", text("llama"), "general.architecture is 'llama', expected 'stem'"),
    ("general.architecture", strings(["stem"]), "general.architecture is missing"),
    ("general.quantization_version", number(UINT32, 1), "quantization_version is 1, expected 2"),
    ("stem.block_count", None, "stem.block_count is missing"),
    ("stem.block_count", number(UINT32, 3), "stem.block_count is 3, expected 2"),
    ("stem.block_count", number(FLOAT32, 2), "stem.block_count is 2.0, expected 2"),
    ("stem.block_count", text("2"), "stem.block_count is '2', expected 2"),
    ("stem.attention.head_count_kv", number(BOOL, 1), "head_count_kv is True, expected 1"),
    ("stem.rope.freq_base", number(FLOAT32, 5e5), "freq_base is 500000.0, expected 500000.1"),
    ("stem.rope.freq_base", number(FLOAT64, 500000.1), "freq_base is 500000.1, expected"),
    ("stem.rope.freq_base", number(FLOAT32, float("nan")), "freq_base is nan, expected"),
    ("stem.rope.freq_base", number(UINT32, 500000), "freq_base is 500000, expected 500000.1"),
    ("stem.layers", array(UINT32, [0]), "stem.layers is (0,), expected (1,)"),
    ("stem.layers", array(UINT32, []), "stem.layers is (), expected (1,)"),
    ("stem.layers", array(BOOL, [1]), "stem.layers is (True,), expected (1,)"),
    ("stem.layers", number(UINT32, 1), "stem.layers is 1, expected (1,)"),
    ("stem.layers", None, "stem.layers is missing"),
    ("stem.ffn", text("stem-plus"), "stem.ffn is 'stem-plus', expected 'stem'"),
    ("stem.tables.sha256", None, "stem.tables.sha256 is missing"),
    ("stem.tables.sha256", text("0" * 64), f"stem.tables.sha256 is '{'0' * 64}', expected '"),
    ("stem.config", text("{}"), "stem.config is '{}', expected"),
    ("stem.more", number(UINT32, 1), "'stem.more' is no key of this model"),
]


@pytest.mark.parametrize(("key", "value", "said"), OTHER_KEYS)
def test_another_key(file: Path, key: str, value: bytes | None, said: str) -> None:
    manifest = manifest_of(STEM)
    keys = backbone_keys(manifest)
    if value is None:
        del keys[key]
    else:
        keys[key] = value
    assert said in unlike(file, keys, {}, manifest)


def test_another_alignment(file: Path) -> None:
    manifest = manifest_of(STEM)
    found = read(file, backbone(backbone_keys(manifest), backbone_tensors(manifest)))
    other = msgspec.structs.replace(found, metadata=found.metadata | {"general.alignment": 64})
    with pytest.raises(BundleError, match=r"general\.alignment is 64, expected 32"):
        check_backbone(other, manifest)


def test_another_config_is_shown_where_it_differs(file: Path) -> None:
    manifest = manifest_of(STEM)
    other = msgspec.structs.replace(STEM, window_layers=(0,))
    message = unlike(file, backbone_keys(manifest_of(other)), {}, manifest)
    assert '"window_layers":[0]' in message
    assert '"window_layers":null' in message


def test_tables_of_a_dense_model(file: Path) -> None:
    manifest = manifest_of(DENSE)
    keys = backbone_keys(manifest) | {"stem.tables.sha256": text("0" * 64)}
    assert "'stem.tables.sha256' is no key of this model" in unlike(file, keys, {}, manifest)


Q, NORM = "blk.0.attn_q.weight", "output_norm.weight"
OTHER_TENSORS: list[tuple[Tensors, str]] = [
    ({Q: None}, f"(tensor {Q} is missing)"),
    ({"blk.0.x": ((8,), F32)}, "(tensor 'blk.0.x' is none of this model's)"),
    ({Q: ((32, 32), F32)}, f"(tensor {Q} is F32 [32, 32], expected Q5_0 [32, 32])"),
    ({Q: ((32, 64), Q5_0)}, f"{Q} is Q5_0 [32, 64], expected Q5_0 [32, 32])"),
    ({Q: ((1024,), Q5_0)}, f"{Q} is Q5_0 [1024], expected Q5_0 [32, 32])"),
    ({NORM: ((32,), F16)}, f"(tensor {NORM} is F16 [32], expected F32 [32])"),
    ({NORM: ((1, 32), F32)}, f"(tensor {NORM} is F32 [1, 32], expected F32 [32])"),
    ({"blk.1.ffn_up.weight": ((64, 32), Q5_0)}, "'blk.1.ffn_up.weight' is none of"),
]


@pytest.mark.parametrize(("changes", "said"), OTHER_TENSORS)
def test_another_tensor(file: Path, changes: Tensors, said: str) -> None:
    manifest = manifest_of(STEM)
    assert said in unlike(file, backbone_keys(manifest), changes, manifest)


def test_the_first_differences_are_named(file: Path) -> None:
    manifest = manifest_of(STEM, "q8_0")
    found = read(file, backbone({}, backbone_tensors(manifest)))
    with pytest.raises(BundleError) as caught:
        check_backbone(found, manifest)
    message = str(caught.value)
    assert "general.architecture is missing; stem.vocab_size is missing; stem.context" in message
    assert "; and 14 more)" in message


@pytest.mark.parametrize(
    ("missing", "said"), [(3, "stem.rope.freq_base is missing)"), (4, "more)")]
)
def test_as_many_differences_as_there_are(file: Path, missing: int, said: str) -> None:
    manifest = manifest_of(STEM)
    keys = backbone_keys(manifest)
    for key in ("general.architecture", "stem.vocab_size", "stem.rope.freq_base", "stem.config"):
        if missing:
            keys.pop(key)
            missing -= 1
    assert said in unlike(file, keys, {}, manifest)


@pytest.mark.parametrize(
    ("value", "other", "shown"),
    [
        ("x" * 78, "y", "'" + "x" * 78 + "'"),
        ("x" * 79, "y", "'" + "x" * 79 + "..."),
        ("x" * 100, "x" * 40, "..." + "x" * 80 + "..."),
        ("x" * 100, "x" * 39 + "y", "'" + "x" * 79 + "..."),
        ("x" * 100, "x" * 100, "..." + "x" * 39 + "'"),
        ("x" * 60 + "y" * 19, "x" * 60, "..." + "x" * 40 + "y" * 19 + "'"),
        ("x" * 60 + "y" * 39, "x" * 60, "..." + "x" * 40 + "y" * 39 + "'"),
        ("x" * 60 + "y" * 40, "x" * 60, "..." + "x" * 40 + "y" * 40 + "..."),
    ],
)
def test_long_values_are_shown_around_their_difference(value: str, other: str, shown: str) -> None:
    assert gguf_check._shown(value, other) == shown


def test_a_bundle_without_a_backbone_for_ggml(file: Path) -> None:
    manifest = manifest_of(STEM)
    found = read(file, backbone(backbone_keys(manifest), backbone_tensors(manifest)))
    with pytest.raises(BundleError, match="manifest has no backbone for ggml; export the backbone"):
        check_backbone(found, manifest_of(STEM, None))


def test_whole_floats_are_written_as_a_manifest_gives_them_back() -> None:
    model = config(rope_theta=10_000, logit_softcap=30)
    assert model_metadata(model)["stem.rope.freq_base"] == 10_000.0
    assert '"rope_theta":10000.0' in str(model_metadata(model)["stem.config"])
