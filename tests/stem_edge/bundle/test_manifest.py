"""Manifests: exact bytes, required fields, and contradictions that are refused."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from changing import edit
from configs import config
from manifests import (
    ARRAY,
    GROUP,
    LAYOUT,
    NAMES,
    SHARDS,
    make_bundle,
    make_manifest,
)

import stem_edge
from stem_edge.bundle.manifest import (
    MANIFEST,
    TABLES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    FileEntry,
    encode_manifest,
)
from stem_edge.bundle.opening import open_bundle
from stem_edge.errors import BundleError
from stem_edge.graph.formats import BACKBONE_DATA, BACKBONE_GRAPH


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "model")


def refusal(path: Path) -> str:
    """The one-line message with which a bundle is refused."""
    with pytest.raises(BundleError) as caught:
        open_bundle(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_bundle_opens(bundle: Path) -> None:
    for path in (bundle, str(bundle)):
        opened = stem_edge.open_bundle(path)
        assert opened.path == bundle
        assert opened.manifest.model == config(dim=16, d_ff=16, bos_id=1, eos_ids=(2,))
        assert opened.manifest.tables == LAYOUT
        assert opened.file(BACKBONE_GRAPH).read_bytes() == b"backbone"


SHA = "0123456789abcdef" * 4
GOLDEN_SIZES = {BACKBONE_GRAPH: 1, BACKBONE_DATA: 8, GROUP: 2, ARRAY: 3, SHARDS[1]: 4}
GOLDEN_SIZES |= {SHARDS[0]: 5, TOKENIZER: 6, TOKENIZER_CONFIG: 7}


GOLDEN: dict[str, Any] = {
    "assistant": None,
    "backbone": {
        "asymmetric": False, "balanced": [], "block_size": 32, "head": "int8", "kinds": {},
        "kv_peaks": False, "matrices": {}, "offsets": False, "prefill": False, "quantizer": "rtn",
        "tied": False,
        "weights": "int4",
    },
    "files": {name: {"nbytes": size, "sha256": SHA} for name, size in GOLDEN_SIZES.items()},
    "format_version": 7,
    "gguf": None,
    "indexed": False,
    "model": {
        "activation": "silu", "active_stream": 0, "attention_scale": 0.0, "biases": [], "borrowed_kv_layers": 0,
        "bos_id": 1, "d_ff": 16, "dim": 16, "embedding_scale": 1.0, "engram_kernel": 0, "eos_ids": [2], "head_dim": 2,
        "laurel_rank": 0, "layer_kinds": [], "layer_scale": False, "logit_softcap": 0.0, "max_context": 16,
        "n_experts": 0, "n_heads": 2, "n_kv_heads": 1, "n_layers": 2, "ngram_end": None,
        "ngram_filler": 0, "ngram_multipliers": [], "ngram_order": 0, "ngram_sizes": [], "norm_eps": 1e-05,
        "placeholders": {}, "ple_gate_scale": False, "ple_records": 0, "ple_scale": 1.0, "ple_width": 0,
        "post_norms": False, "qk_norm_eps": None, "ranges": {}, "rope_interleaved": True, "rope_scaling": None,
        "rope_theta": 10000.0, "row_experts": 0, "row_rank": 0, "row_window": 0, "sliding_window": 0, "stem_ffn": "stem",
        "stem_layers": [1], "streams": 1, "tied_head": False, "v_norm": False, "vocab_size": 10,
        "window_layers": None,
    },
    "rare_tables": None,
    "report": {
        "agreement": None, "backbone_nbytes": 8, "divergence": 0.5,
        "divergence_99": None, "notes": [], "prefill_divergence": None, "probe_tokens": [1, 2, 3],
        "tables_nbytes": 200,
    },
    "sampling": None,
    "tables": {
        "group_size": 16, "layers": [1], "parts": [[16]], "records": 10, "row_type": "int8",
        "scale_type": "fp32",
    },
}  # fmt: skip


def test_exact_bytes_of_a_manifest() -> None:
    """Fields are sorted, one per line; the order in which files were found does not matter."""
    entries = {name: FileEntry(nbytes, SHA) for name, nbytes in GOLDEN_SIZES.items()}
    text = json.dumps(GOLDEN, indent=1, sort_keys=True).replace("1e-05", "0.00001") + "\n"
    assert encode_manifest(make_manifest(entries)).decode() == text
    backwards = dict(reversed(entries.items()))
    assert encode_manifest(make_manifest(backwards)).decode() == text


REQUIRED = [
    *["format_version", "model", "backbone", "tables", "files", "report"],
    *["model vocab_size", "model stem_layers", "model norm_eps", "model max_context"],
    *["backbone weights", "backbone head", "backbone block_size"],
    *["tables records", "tables layers", "tables parts", "tables row_type"],
    *["files tokenizer.json nbytes", "files tokenizer.json sha256"],
    "report tables_nbytes",
    *["files backbone.onnx", "files tokenizer.json", "files tokenizer_config.json"],
    # Required, because without these two no table could be read.
    *[f"files {GROUP}", f"files {ARRAY}"],
]


@pytest.mark.parametrize("where", REQUIRED)
def test_missing_fields(bundle: Path, where: str) -> None:
    edit(bundle / MANIFEST, where, ...)
    message = refusal(bundle)
    assert message.startswith(f"{bundle / MANIFEST}: not a manifest of format 7 (")
    assert where.split(" ")[-1] in message
    assert message.endswith("export the bundle again")


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        ("model", [], "Expected `object`, got `array` - at `$.model`"),
        ("model tied_head", 1, "Expected `bool`, got `int` - at `$.model.tied_head`"),
        ("model head_dim", 3, "head_dim 3 is odd"),
        ("backbone weights", "int3", "Invalid enum value 'int3' - at `$.backbone.weights`"),
        ("tables row_type", "bf16", "Invalid enum value 'bf16' - at `$.tables.row_type`"),
        ("sampling", {"temperature": -1}, "temperature is -1.0; expected 0.0 to"),
        ("sampling", {"top_p": 0}, "top_p is 0.0; expected"),
        ("sampling", {"top_k": "all"}, "Expected `int | null`, got `str` - at `$.sampling.top_k`"),
        ("sampling", {"typical_p": 1}, "unknown field `typical_p`"),
        ("tables group_size", 24, "group_size 24 must be a power of two"),
        (f"files {BACKBONE_GRAPH} sha256", 5, "Expected `str`, got `int`"),
        # Tables of another model.
        ("tables records", 11, "11 records of 10 tokens, but no index"),
        ("tables parts", [[32]], "of the model: ((16,),), but of the tables: ((32,),)"),
        ("tables layers", [0], "STEM layers of the model: (1,), but of the tables: (0,)"),
        ("model stem_layers", [0, 1], "STEM layers of the model: (0, 1), but of the tables: (1,)"),
    ],
)
def test_wrong_values_are_named(bundle: Path, where: str, value: object, said: str) -> None:
    edit(bundle / MANIFEST, where, value)
    message = refusal(bundle)
    assert message.startswith(f"{bundle / MANIFEST}: not a manifest of format 7 (")
    assert said in message


RARE = msgspec.structs.replace(LAYOUT, records=6, row_type="int4")
INDEX_FILES = [f"{TABLES}/index/zarr.json", f"{TABLES}/index/c/0"]
RARE_FILE = f"{TABLES}/rare_records/zarr.json"


def test_an_index_and_rare_tables_have_files_of_their_own() -> None:
    names = [*NAMES, *INDEX_FILES, RARE_FILE]
    files = {name: FileEntry(1, SHA) for name in names}
    manifest = msgspec.structs.replace(make_manifest(files), rare_tables=RARE, indexed=True)
    assert {*INDEX_FILES, RARE_FILE} <= set(manifest.required_files())
    assert manifest.table_format is not None
    assert manifest.table_format.arrays()["records"].records == 4
    for missing in (*INDEX_FILES, RARE_FILE):
        fewer = {name: entry for name, entry in files.items() if name != missing}
        with pytest.raises(ValueError, match=f"no entry for {missing}"):
            msgspec.structs.replace(manifest, files=fewer)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rare_tables": RARE}, "rare tables, but no index"),
        ({"indexed": True}, f"no entry for {INDEX_FILES[0]}"),
        (
            {"indexed": True, "rare_tables": msgspec.structs.replace(RARE, layers=(0,))},
            "do not widen",
        ),
        ({"indexed": True, "stored": RARE}, "records of the model: 10, but of the tables: 6"),
        ({"stored": None}, "no tables, but STEM layers"),
    ],
)
def test_tables_that_contradict_themselves(changes: dict[str, object], said: str) -> None:
    manifest = make_manifest({name: FileEntry(1, SHA) for name in NAMES})
    with pytest.raises(ValueError, match=said):
        msgspec.structs.replace(manifest, **changes)


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        ("format_version", 8, "bundle format 8, expected 7; upgrade stem-edge"),
        ("format_version", 5, "with: stem-edge export CHECKPOINT"),
        ("format_version", 0, "bundle format 0, expected 7"),
    ],
)
def test_other_formats(bundle: Path, where: str, value: object, said: str) -> None:
    edit(bundle / MANIFEST, where, value)
    assert said in refusal(bundle)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none", "no such bundle folder; give the folder of an export"),
        ("a\0b", "no such bundle folder; give the folder of an export"),
        ("none.gguf", "no such file; give the folder of an export, or a GGUF file"),
        ("notes.txt", "no such bundle folder, but a file; give the folder of an export"),
        (
            "model.gguf",
            "with: stem-edge export model.gguf OUT, or name the one that stem-edge run made",
        ),
        (".", "not a bundle, it has no manifest.json; make one with: stem-edge export"),
    ],
)
def test_folders_that_are_not_bundles(tmp_path: Path, name: str, said: str) -> None:
    for file in ("notes.txt", "model.gguf"):
        (tmp_path / file).touch()
    message = refusal(tmp_path / name)
    assert message.startswith(f"{tmp_path / name}: ")
    assert said in message and "hf:" not in message


@pytest.mark.parametrize("name", ["acme/nosuch", "HF:acme/nosuch"])
def test_a_name_on_a_hub_is_proposed(name: str) -> None:
    assert refusal(Path(name)).endswith("of an export, or a GGUF file, or hf:acme/nosuch")
