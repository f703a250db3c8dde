import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import msgspec
import numpy as np
import pytest
from stores import write_store
from test_config import config
from test_shards import edit

import stem_edge
from stem_edge.bundle import (
    BACKBONE_GRAPH,
    MANIFEST,
    MAX_MANIFEST_NBYTES,
    TABLES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    FileEntry,
    KindError,
    Manifest,
    QualityReport,
    encode_manifest,
    open_bundle,
    weight_nbytes,
)
from stem_edge.checksums import verify
from stem_edge.errors import BundleError
from stem_edge.formats import BackboneFormat
from stem_edge.graph.decode import BACKBONE_DATA
from stem_edge.rows import RecordLayout

LAYOUT = RecordLayout(records=10, layers=(1,), parts=((16,),), row_type="int8", group_size=16)
GROUP, ARRAY = f"{TABLES}/zarr.json", f"{TABLES}/records/zarr.json"
SHARDS = [f"{TABLES}/records/c/0/0", f"{TABLES}/records/c/1/0"]
NAMES = sorted([BACKBONE_GRAPH, BACKBONE_DATA, TOKENIZER, TOKENIZER_CONFIG, GROUP, ARRAY, *SHARDS])


REPORT = QualityReport(
    checkpoint_nbytes=2000,
    backbone_nbytes=8,
    tables_nbytes=200,
    errors={"tables": KindError(worst=0.5, mean=0.25)},
    probe_tokens=(1, 2, 3),
    worst_logit_difference=0.125,
    greatest_logit=4.0,
    divergence=0.5,
)


def make_manifest(files: dict[str, FileEntry]) -> Manifest:
    return Manifest(
        format_version=4,
        model=config(dim=16, d_ff=16, bos_id=1, eos_ids=(2,)),
        backbone=BackboneFormat(weights="int4", head="int8", block_size=32),
        tables=LAYOUT,
        files=files,
        reports={"onnxruntime": REPORT},
    )


WEIGHTS_NBYTES = weight_nbytes(make_manifest({name: FileEntry(1, "0" * 64) for name in NAMES}))[
    BACKBONE_DATA
]


def make_bundle(path: Path) -> Path:
    path.mkdir()
    (path / BACKBONE_GRAPH).write_bytes(b"backbone")
    (path / BACKBONE_DATA).write_bytes(bytes(WEIGHTS_NBYTES))
    (path / TOKENIZER).write_bytes(b"{}")
    (path / TOKENIZER_CONFIG).write_bytes(b'{"a": 1}')
    write_store(path / TABLES, LAYOUT, np.zeros((10, LAYOUT.record_nbytes), np.uint8), 6)
    entries = {}
    for name in NAMES:
        data = (path / name).read_bytes()
        entries[name] = FileEntry(len(data), hashlib.sha256(data).hexdigest())
    (path / MANIFEST).write_bytes(encode_manifest(make_manifest(entries)))
    return path


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "model")


def short(value: object) -> str:
    return repr(value)[:8]


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
GOLDEN = """\
{
 "backbone": {
  "asymmetric": false,
  "balanced": [],
  "block_size": 32,
  "head": "int8",
  "kinds": {},
  "prefill": false,
  "quantizer": "rtn",
  "weights": "int4"
 },
 "files": {
  "backbone.onnx": {
   "nbytes": 1,
   "sha256": "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
  },
  "backbone.onnx.data": {
   "nbytes": 8,
   "sha256": "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
  },
  "tables.zarr/records/c/0/0": {
   "nbytes": 5,
   "sha256": "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
  },
  "tables.zarr/records/c/1/0": {
   "nbytes": 4,
   "sha256": "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
  },
  "tables.zarr/records/zarr.json": {
   "nbytes": 3,
   "sha256": "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
  },
  "tables.zarr/zarr.json": {
   "nbytes": 2,
   "sha256": "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
  },
  "tokenizer.json": {
   "nbytes": 6,
   "sha256": "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
  },
  "tokenizer_config.json": {
   "nbytes": 7,
   "sha256": "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
  }
 },
 "format_version": 4,
 "gguf": null,
 "indexed": false,
 "model": {
  "biases": [],
  "bos_id": 1,
  "d_ff": 16,
  "dim": 16,
  "eos_ids": [
   2
  ],
  "head_dim": 2,
  "logit_softcap": 0.0,
  "max_context": 16,
  "n_experts": 0,
  "n_heads": 2,
  "n_kv_heads": 1,
  "n_layers": 2,
  "norm_eps": 0.00001,
  "post_norms": false,
  "qk_norm_eps": null,
  "rope_interleaved": true,
  "rope_scaling": null,
  "rope_theta": 10000.0,
  "row_rank": 0,
  "sliding_window": 0,
  "stem_ffn": "stem",
  "stem_layers": [
   1
  ],
  "tied_head": false,
  "vocab_size": 10,
  "window_layers": null
 },
 "rare_tables": null,
 "reports": {
  "onnxruntime": {
   "agreement": null,
   "backbone_nbytes": 8,
   "checkpoint_nbytes": 2000,
   "divergence": 0.5,
   "divergence_99": null,
   "errors": {
    "tables": {
     "mean": 0.25,
     "worst": 0.5
    }
   },
   "greatest_logit": 4.0,
   "notes": [],
   "prefill_divergence": null,
   "prefill_from_decode": null,
   "probe_tokens": [
    1,
    2,
    3
   ],
   "tables_nbytes": 200,
   "worst_logit_difference": 0.125
  }
 },
 "tables": {
  "group_size": 16,
  "layers": [
   1
  ],
  "parts": [
   [
    16
   ]
  ],
  "records": 10,
  "row_type": "int8",
  "scale_type": "fp32"
 }
}
"""
GOLDEN_SIZES = {
    BACKBONE_GRAPH: 1,
    BACKBONE_DATA: 8,
    GROUP: 2,
    ARRAY: 3,
    SHARDS[1]: 4,
    SHARDS[0]: 5,
    TOKENIZER: 6,
    TOKENIZER_CONFIG: 7,
}


def test_exact_bytes_of_a_manifest() -> None:
    entries = {name: FileEntry(nbytes, SHA) for name, nbytes in GOLDEN_SIZES.items()}
    assert encode_manifest(make_manifest(entries)).decode() == GOLDEN


def test_order_of_files_does_not_change_the_bytes() -> None:
    entries = {name: FileEntry(nbytes, SHA) for name, nbytes in GOLDEN_SIZES.items()}
    backwards = dict(reversed(entries.items()))
    assert encode_manifest(make_manifest(backwards)) == encode_manifest(make_manifest(entries))


def test_a_manifest_comes_back(bundle: Path) -> None:
    data = (bundle / MANIFEST).read_bytes()
    assert encode_manifest(open_bundle(bundle).manifest) == data


@pytest.mark.parametrize(
    "where",
    [
        "",
        "model",
        "backbone",
        "tables",
        "reports onnxruntime",
        "reports onnxruntime errors tables",
        "files tokenizer.json",
    ],
)
def test_unknown_fields(bundle: Path, where: str) -> None:
    edit(bundle / MANIFEST, f"{where} surprise".strip(), 1)
    assert "unknown field `surprise`" in refusal(bundle)


REQUIRED = [
    *["format_version", "model", "backbone", "tables", "files", "reports", "reports onnxruntime"],
    *["model vocab_size", "model stem_layers", "model norm_eps", "model max_context"],
    *["backbone weights", "backbone head", "backbone block_size"],
    *["tables records", "tables layers", "tables parts", "tables row_type"],
    *["files tokenizer.json nbytes", "files tokenizer.json sha256"],
    *[
        "reports onnxruntime checkpoint_nbytes",
        "reports onnxruntime errors",
        "reports onnxruntime errors tables worst",
    ],
    *["files backbone.onnx", "files tokenizer.json", "files tokenizer_config.json"],
    # Without these two nothing could be read of the tables.
    *[f"files {GROUP}", f"files {ARRAY}"],
]


@pytest.mark.parametrize("where", REQUIRED)
def test_missing_fields(bundle: Path, where: str) -> None:
    edit(bundle / MANIFEST, where, ...)
    message = refusal(bundle)
    assert message.startswith(f"{bundle / MANIFEST}: not a manifest of format 4 (")
    assert where.split(" ")[-1] in message
    assert message.endswith("export the bundle again")


INTEGERS = [
    *["format_version", "model vocab_size", "model dim", "backbone block_size", "tables records"],
    *[
        "files backbone.onnx nbytes",
        "reports onnxruntime checkpoint_nbytes",
        "reports onnxruntime backbone_nbytes",
    ],
    "reports onnxruntime tables_nbytes",
]


@pytest.mark.parametrize("where", INTEGERS)
@pytest.mark.parametrize("value", ["8", 8.0, True, None, [8], -8, 10**400], ids=short)
def test_numbers_that_count_nothing(bundle: Path, where: str, value: object) -> None:
    edit(bundle / MANIFEST, where, value)
    assert refusal(bundle).startswith(str(bundle))


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        ("model", [], "Expected `object`, got `array` - at `$.model`"),
        ("model stem_layers", "1", "Expected `array`, got `str` - at `$.model.stem_layers`"),
        ("model stem_layers", [1.0], "Expected `int`, got `float`"),
        ("model norm_eps", "x", "Expected `float`, got `str` - at `$.model.norm_eps`"),
        ("model tied_head", 1, "Expected `bool`, got `int` - at `$.model.tied_head`"),
        ("model head_dim", 3, "head_dim 3 is odd"),
        ("backbone weights", "int3", "Invalid enum value 'int3' - at `$.backbone.weights`"),
        ("backbone weights", 4, "at `$.backbone.weights`"),
        ("tables row_type", "bf16", "Invalid enum value 'bf16' - at `$.tables.row_type`"),
        ("tables group_size", 24, "group_size 24 must be a power of two"),
        ("files", [], "Expected `object`, got `array` - at `$.files`"),
        (f"files {BACKBONE_GRAPH} sha256", 5, "Expected `str`, got `int`"),
        (f"files {BACKBONE_GRAPH} nbytes", -1, "Expected `int` >= 0"),
        (
            "reports onnxruntime errors",
            [],
            "Expected `object`, got `array` - at `$.reports[...].errors`",
        ),
        (
            "reports onnxruntime probe_tokens",
            ["1"],
            "Expected `int`, got `str` - at `$.reports[...].probe_tokens",
        ),
    ],
)
def test_wrong_values_are_named(bundle: Path, where: str, value: object, said: str) -> None:
    edit(bundle / MANIFEST, where, value)
    message = refusal(bundle)
    assert message.startswith(f"{bundle / MANIFEST}: not a manifest of format 4 (")
    assert said in message


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        ("tables records", 11, "11 records of 10 tokens, but no index of them"),
        ("tables parts", [[32]], "parts of a row of the model is ((16,),), of the tables ((32,),)"),
        ("tables layers", [0], "STEM layers of the model is (1,), of the tables (0,)"),
        ("model stem_layers", [0, 1], "STEM layers of the model is (0, 1), of the tables (1,)"),
    ],
)
def test_model_and_tables_must_agree(bundle: Path, where: str, value: object, said: str) -> None:
    edit(bundle / MANIFEST, where, value)
    assert said in refusal(bundle)


RARE = msgspec.structs.replace(LAYOUT, records=6, row_type="int4")
INDEX_FILES = [f"{TABLES}/index/zarr.json", f"{TABLES}/index/c/0"]
RARE_FILE = f"{TABLES}/rare_records/zarr.json"


def test_an_index_and_rare_tables_have_files_of_their_own() -> None:
    names = [*NAMES, *INDEX_FILES, RARE_FILE]
    files = {name: FileEntry(1, SHA) for name in names}
    manifest = msgspec.structs.replace(make_manifest(files), rare_tables=RARE, indexed=True)
    assert {*INDEX_FILES, RARE_FILE} <= set(manifest.required_files())
    assert manifest.table_format is not None
    assert manifest.table_format.frequent == 4
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
        ({"indexed": True, "tables": RARE}, "records of the model is 10, of the tables 6"),
        ({"tables": None}, "no tables, but STEM layers"),
    ],
)
def test_tables_that_contradict_themselves(changes: dict[str, object], said: str) -> None:
    manifest = make_manifest({name: FileEntry(1, SHA) for name in NAMES})
    with pytest.raises(ValueError, match=said):
        msgspec.structs.replace(manifest, **changes)


def test_a_dense_model_has_no_index() -> None:
    manifest = make_manifest({name: FileEntry(1, SHA) for name in NAMES})
    dense = msgspec.structs.replace(
        manifest, model=config(dim=16, d_ff=16, stem_layers=()), tables=None
    )
    assert dense.table_format is None
    with pytest.raises(ValueError, match="rare tables or index"):
        msgspec.structs.replace(dense, indexed=True)


@pytest.mark.parametrize("version", [5, 10**9])
def test_a_newer_format_asks_for_an_upgrade(bundle: Path, version: int) -> None:
    (bundle / MANIFEST).write_text(json.dumps({"format_version": version, "files": "elsewhere"}))
    message = refusal(bundle)
    assert f"bundle format {version} is newer than this stem-edge reads (4)" in message
    assert message.endswith("upgrade stem-edge")


@pytest.mark.parametrize("version", [3, 0])
def test_an_older_format_asks_for_another_export(bundle: Path, version: int) -> None:
    (bundle / MANIFEST).write_text(json.dumps({"format_version": version, "files": "elsewhere"}))
    message = refusal(bundle)
    assert f"bundle format {version} is older than this stem-edge reads (4)" in message
    assert message.endswith(f"again with: stem-edge export CHECKPOINT {bundle} --force")


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        ("model vocab_size", 9, "but the weights of this model take "),
        ("model n_layers", 3, "but the weights of this model take "),
        ("backbone head", "int4", "but the weights of this model take "),
        ("backbone asymmetric", True, "but the weights of this model take "),
        ("model dim", 24, "cannot be stored as it says (embedding: its width 24"),
    ],
)
def test_weights_of_another_size_than_the_models(
    bundle: Path, where: str, value: object, said: str
) -> None:
    if where == "model vocab_size":
        edit(bundle / MANIFEST, "tables records", value)
    edit(bundle / MANIFEST, where, value)
    message = refusal(bundle)
    assert said in message
    assert message.endswith("copy or export the bundle again")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data[:-20], id="cut"),
        pytest.param(lambda data: data + b"{}", id="two values"),
        pytest.param(lambda data: data + b"\0", id="padded with NUL"),
        pytest.param(lambda data: b"[]", id="array"),
        pytest.param(lambda data: b"null", id="null"),
        pytest.param(lambda data: b"\xef\xbb\xbf" + data, id="BOM"),
        pytest.param(lambda data: data.decode().encode("utf-16"), id="UTF-16"),
        pytest.param(lambda data: data.replace(b"tokenizer.json", b"t\xff.json"), id="not UTF-8"),
        pytest.param(lambda data: data.replace(b"0.125", b"NaN"), id="NaN"),
        pytest.param(lambda data: data.replace(b"0.125", b"1e999"), id="infinite"),
        pytest.param(lambda data: data.replace(b"2000", b"9" * 5000), id="endless number"),
        pytest.param(lambda data: b'{"model": ' + b"[" * 200_000, id="deep"),
        pytest.param(lambda data: b'{"format_version": ' + b"[" * 200_000, id="deep version"),
        pytest.param(
            lambda data: b'{"format_version": 1,' + data.lstrip(b"{"), id="field given twice"
        ),
        pytest.param(
            lambda data: data.replace(
                b'"tokenizer.json": {',
                b'"backbone.onnx": {"nbytes": 8, "sha256": ""}, "tokenizer.json": {',
            ),
            id="file given twice",
        ),
    ],
)
def test_manifests_that_are_not_plain_json(bundle: Path, change: Callable[[bytes], bytes]) -> None:
    path = bundle / MANIFEST
    path.write_bytes(change(path.read_bytes()))
    assert refusal(bundle).startswith(f"{path}: not a manifest of format 4 (")


def test_a_manifest_that_is_too_large(bundle: Path) -> None:
    path = bundle / MANIFEST
    path.write_bytes(path.read_bytes().ljust(MAX_MANIFEST_NBYTES))
    open_bundle(bundle)
    path.write_bytes(path.read_bytes() + b" ")
    assert f"{path}: larger than {MAX_MANIFEST_NBYTES} bytes" in refusal(bundle)


@pytest.mark.parametrize(
    "name",
    [
        *["/etc/passwd", "//host/file", "..", "../file", "a/../../file", "a/..", "a/../b"],
        *["a\\b", "..\\file", "C:file", "C:/file", "file:stream", "a\0b"],
        *["", ".", "./a", "a/./b", "a//b", "a/", MANIFEST],
        # Names are printed: they must not steer the terminal or fake a line.
        *["a\nb", "a\x1b[2Jb", "a\x7fb", "a\x9b2Jb"],
    ],
    ids=repr,
)
def test_names_that_are_not_plain_paths_below_the_bundle(bundle: Path, name: str) -> None:
    document = json.loads((bundle / MANIFEST).read_bytes())
    document["files"][name] = {"nbytes": 0, "sha256": SHA}
    (bundle / MANIFEST).write_text(json.dumps(document))
    assert "is not a plain path inside the bundle" in refusal(bundle)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [0, -1, 1], ids=["empty", "cut", "longer"])
def test_a_file_of_another_size(bundle: Path, name: str, size: int) -> None:
    path = bundle / name
    data = path.read_bytes()
    changed = {0: b"", -1: data[:-1], 1: data + b"\0"}[size]
    path.write_bytes(changed)
    message = refusal(bundle)
    assert f"{path}: {len(changed)} bytes found, {len(data)} expected" in message
    assert "copy or export the bundle again" in message


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file(bundle: Path, name: str) -> None:
    size = (bundle / name).stat().st_size
    (bundle / name).unlink()
    message = refusal(bundle)
    assert f"{bundle / name}: missing" in message
    assert f"expected {size} bytes" in message


def test_a_missing_folder(bundle: Path) -> None:
    shutil.rmtree(bundle / TABLES)
    assert f"{bundle / TABLES}" in refusal(bundle)


@pytest.fixture
def two_seconds() -> Iterator[None]:
    def late(signum: int, frame: FrameType | None) -> None:
        pytest.fail("still waiting after 2 seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(2)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def link(path: Path) -> None:
    shutil.move(path, path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("instead", [link, pipe, folder])
@pytest.mark.parametrize("name", [BACKBONE_GRAPH, GROUP, SHARDS[0]])
@pytest.mark.usefixtures("two_seconds")
def test_something_else_than_a_file(
    bundle: Path, name: str, instead: Callable[[Path], None]
) -> None:
    instead(bundle / name)
    assert f"{bundle / name}: not a regular file" in refusal(bundle)
    assert verify(bundle)[name].startswith("not a regular file")


@pytest.mark.parametrize("instead", [link, pipe, folder])
@pytest.mark.usefixtures("two_seconds")
def test_something_else_than_a_manifest(bundle: Path, instead: Callable[[Path], None]) -> None:
    instead(bundle / MANIFEST)
    assert f"{bundle / MANIFEST}: not a regular file" in refusal(bundle)


def test_no_folder(tmp_path: Path) -> None:
    assert f"{tmp_path / 'none'}: no such bundle folder" in refusal(tmp_path / "none")


def test_a_file_instead_of_a_folder(bundle: Path) -> None:
    assert f"{bundle / BACKBONE_GRAPH}: no such bundle folder" in refusal(bundle / BACKBONE_GRAPH)


def test_a_folder_that_is_no_bundle(tmp_path: Path) -> None:
    message = refusal(tmp_path)
    assert f"{tmp_path}: not a bundle, it has no manifest.json" in message
    assert "stem-edge export" in message


def test_opening_does_not_hash(bundle: Path) -> None:
    (bundle / BACKBONE_GRAPH).write_bytes(b"BACKBONE")
    open_bundle(bundle)


def test_verify_a_whole_bundle(bundle: Path) -> None:
    assert verify(bundle) == dict.fromkeys(NAMES, "ok")


def test_verify_counts_every_byte(bundle: Path) -> None:
    pieces: list[int] = []
    verify(bundle, pieces.append)
    assert sum(pieces) == sum((bundle / name).stat().st_size for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_verify_finds_a_flipped_bit(bundle: Path, name: str) -> None:
    data = bytearray((bundle / name).read_bytes())
    data[-1] ^= 1
    (bundle / name).write_bytes(data)
    results = verify(bundle)
    digest = hashlib.sha256(data).hexdigest()
    assert results.pop(name).startswith(f"sha256 is {digest}, expected ")
    assert set(results.values()) == {"ok"}


def test_verify_finds_a_cut_and_a_missing_file(bundle: Path) -> None:
    (bundle / BACKBONE_GRAPH).write_bytes(b"back")
    (bundle / SHARDS[1]).unlink()
    results = verify(bundle)
    assert results.pop(BACKBONE_GRAPH).startswith("4 bytes found, 8 expected")
    assert results.pop(SHARDS[1]).startswith("missing")
    assert set(results.values()) == {"ok"}


def test_verify_lists_files_that_do_not_belong(bundle: Path) -> None:
    extra = ["notes.txt", f"{TABLES}/records/c/2/0", ".hidden", "dangling"]
    for name in extra[:3]:
        (bundle / name).parent.mkdir(exist_ok=True)
        (bundle / name).touch()
    (bundle / "dangling").symlink_to("nowhere")
    results = verify(bundle)
    assert {name: results.pop(name) for name in extra} == dict.fromkeys(
        extra, "not part of the bundle"
    )
    assert set(results.values()) == {"ok"}


def test_verify_refuses_a_damaged_manifest(bundle: Path) -> None:
    (bundle / MANIFEST).write_bytes(b"{")
    with pytest.raises(BundleError, match="not a manifest"):
        verify(bundle)
