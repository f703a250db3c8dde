"""Checkpoints as a whole: broken values, tables that do not fit, hostile numbers, changed sources."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tarfile
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract import command_refused, refused
from make_checkpoint import Shape, write_checkpoint
from safetensors.torch import load_file, save_file
from stem_format import save_stem
from tiers import slow_but
from torch_model import random_tensors

import stem_edge
from stem_edge.config import ModelConfig
from stem_edge.errors import CheckpointError, ExportError, InputError
from stem_edge.export import exporter
from stem_edge.export.checkpoints.hugging_face.names import tensor_name
from stem_edge.export.checkpoints.readers import read_checkpoint
from stem_edge.export.quantization.calibration import read_token_ids
from stem_edge.export.tokenizers.tokenizer import convert_tokenizer

CONFIG = ModelConfig(
    vocab_size=260, dim=32, n_layers=6, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64,
    stem_layers=(1, 2, 3, 5), norm_eps=1e-5, rope_theta=1e4, max_context=64,
    rope_interleaved=False,
)  # fmt: skip


def table_name(layer: int) -> str:
    return f"model.layers.{layer}.mlp.stem_table.weight"


@pytest.fixture
def stem(tmp_path: Path) -> Path:
    """A model in this project's schema, with four tables."""
    backbone, tables = random_tensors(CONFIG, 0)
    tensors = {tensor_name(name): tensor for name, tensor in backbone.items()}
    tensors |= {table_name(layer): tensor for layer, tensor in tables.items()}
    save_stem(tmp_path / "stem", CONFIG, tensors)
    tokenizer = convert_tokenizer("bytes", None, add_bos=True)
    (tmp_path / "stem/tokenizer.json").write_text(tokenizer.json)
    (tmp_path / "stem/tokenizer_config.json").write_text(json.dumps(tokenizer.config))
    return tmp_path / "stem"


@pytest.fixture
def lingua(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "lingua", Shape(), layout="consolidated")


def edit(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Change tables (`t1` for that of layer 1); None removes one."""
    path = folder / "model.safetensors"
    stored = load_file(path)
    for name, tensor in tensors.items():
        stored.pop(table_name(int(name[1:])))
        if tensor is not None:
            stored[table_name(int(name[1:]))] = tensor
    save_file(stored, path)


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def not_read(path: Path, *naming: str | Path) -> str:
    return refused(lambda: read_checkpoint(path), CheckpointError, *naming, kept=[path])


def not_exported(path: Path, out: Path, *naming: str | Path, **options: Any) -> None:
    kept = [path, *([out] if out.exists() else [])]
    refused(
        lambda: stem_edge.export_bundle(path, out, **options), CheckpointError, *naming, kept=kept
    )
    assert not list(out.parent.glob(".stem-edge-*"))


INFINITE = float("inf")


@pytest.mark.parametrize("value", slow_but([INFINITE], [float("nan"), INFINITE, -INFINITE]))
def test_c11_rows_that_are_no_numbers_are_refused_with_tensor_row_and_count(
    stem: Path, tmp_path: Path, value: float
) -> None:
    """No option allows it, because such a row would turn every answer that uses it into NaN."""
    table = torch.ones(260, 64)
    table[17, 3:5] = value
    edit(stem, t2=table)
    not_exported(stem, tmp_path / "out", "2 NaN or infinite values", "the first in row 17")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{}, {"type": "fp32"}], ids=["", "fp32"])
@pytest.mark.parametrize(
    ("name", "factor", "named"),
    [
        ("norm", 0.0, "all logits are equal, so the model says nothing (norm is all zeros)"),
        ("", 0.0, "all logits are equal"),
        ("layers.0.down", 1e30, "layer 0 computes NaN or infinite values from finite weights"),
        ("layers.4.wk", 3e37, "layer 4 computes NaN or infinite values from finite weights"),
        ("head", 3e38, "the head computes NaN or infinite logits from finite weights"),
        ("layers.2.wo", float("inf"), "layers.2.wo: 1024 NaN or infinite values"),
        ("norm", float("nan"), "norm: 32 NaN or infinite values"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_c11_models_that_say_nothing_are_refused(
    stem: Path, tmp_path: Path, name: str, factor: float, named: str, options: dict[str, Any]
) -> None:
    """The values of one tensor are multiplied, or all of them. A warning of numpy would not help."""
    path = stem / "model.safetensors"
    stored, changed = load_file(path), tensor_name(name) if name else ""
    for key in stored:
        if changed in ("", key):
            stored[key] = stored[key] * factor
    save_file(stored, path)
    not_exported(stem, tmp_path / "out", named, **options)
    assert not (tmp_path / "out").exists()


def test_c11_tables_of_zeros_are_noted_and_exported(stem: Path, tmp_path: Path) -> None:
    """A model may have learnt to leave a layer out, and the bundle computes what the model does."""
    edit(stem, t2=torch.zeros(260, 64), t3=torch.zeros(260, 64))
    last = torch.zeros(260, 64)
    last[259, 63] = 1e-30
    edit(stem, t5=last)
    _, note = read_checkpoint(stem).notes
    assert "the table of layer 3 is all zeros" in note
    bundle = stem_edge.export_bundle(stem, tmp_path / "out", type="fp32")
    assert note in bundle.manifest.report.notes


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.int8, "I8"), (torch.float8_e5m2, "F8_E5M2"), (torch.bool, "BOOL"),
        (torch.int64, "I64"),
    ],
)  # fmt: skip
def test_c11_types_that_are_not_supported_are_named(
    stem: Path, lingua: Path, dtype: torch.dtype, name: str
) -> None:
    edit(stem, t1=torch.ones(260, 64).to(dtype))
    not_read(stem, table_name(1), f"is {name}", "BF16, F16, F32, F64")
    path = lingua / "consolidated_stem.pth"
    tables = torch.load(path, weights_only=True)
    torch.save(tables | {"stem_embeddings.0.weight": torch.ones(300, 64).to(dtype)}, path)
    not_read(lingua, path, f"is {name}")


def test_c12_all_tables_that_differ_are_named_at_once(stem: Path, lingua: Path) -> None:
    path = lingua / "consolidated_stem.pth"
    tables = {f"stem_embeddings.{n}.weight": torch.zeros(299 + 2 * n, 64) for n in range(2)}
    torch.save(tables, path)
    not_read(lingua, "layer 1 is [299, 64]", "layer 2 is [301, 64]", "expected [300, 64]")
    torch.save({}, path)
    not_read(lingua, path, "stem_embeddings.0.weight, stem_embeddings.1.weight")
    edit(stem, t2=torch.zeros(260, 63))
    not_read(stem, table_name(2), "[260, 63]")
    edit(stem, t2=None)
    not_read(stem, table_name(2), "no tensor")


def test_c13_code_that_a_config_names_is_not_run_but_noted(stem: Path) -> None:
    edit_json(stem / "config.json", auto_map={"AutoModel": "evil.Model"}, trust_remote_code=True)
    (stem / "evil.py").write_text("raise SystemExit('run')")
    (note,) = read_checkpoint(stem).notes
    assert note == "config.json names code (auto_map, trust_remote_code), which is not run"


NUMBERS = [-1, 0, 10**9, 2**31, 2**63, 2**64, 10**40]
SIZES = {
    "config.json": ["num_hidden_layers", "vocab_size", "hidden_size", "num_attention_heads"],
    "params.json": ["n_layers", "vocab_size", "dim", "n_heads"],
}


@pytest.mark.parametrize("number", NUMBERS)
def test_c13_sizes_beyond_all_limits_are_refused_before_anything_is_made_of_them(
    stem: Path, lingua: Path, number: int
) -> None:
    for folder, name in ((stem, "config.json"), (lingua, "params.json")):
        text = (folder / name).read_text()
        for key in SIZES[name]:
            content = json.loads(text)
            (content["model"] if name == "params.json" else content)[key] = number
            (folder / name).write_text(json.dumps(content))
            if key == "vocab_size" and name == "params.json" and number < 1:
                continue  # means "as the tokenizer has"
            if key == "n_heads" and number == 0:
                continue
            refused(partial(read_checkpoint, folder), CheckpointError, folder, seconds=5)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"a": 1, "a": 2}', "[" * 10**5, '{"a": 1e999}', "NaN", "\ufeff{}"],
)
def test_c13_configs_that_are_no_plain_json(stem: Path, lingua: Path, text: str) -> None:
    for path in (stem / "config.json", lingua / "params.json"):
        path.write_text(text)
        refused(partial(read_checkpoint, path.parent), CheckpointError, path)
    (stem / "config.json").write_bytes(b'{"model_type": "\xff"}')
    not_read(stem, "config.json")


@pytest.mark.parametrize(
    ("kind", "name"), [("stem", "model.safetensors"), ("lingua", "consolidated_stem.pth")]
)
def test_c14_a_source_that_changes_meanwhile_ends_the_export(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    name: str,
) -> None:
    """A file that another replaces is read on as it was."""
    folder, real = request.getfixturevalue(kind), exporter._write

    def run(*arguments: Any) -> None:
        status = (folder / name).stat()
        os.utime(folder / name, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        real(*arguments)

    monkeypatch.setattr(exporter, "_write", run)
    refused(
        lambda: stem_edge.export_bundle(folder, tmp_path / "out", type="fp32"),
        CheckpointError,
        folder / name,
        "was changed during the export; nothing was written",
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("force", [False, True])
def test_c15_an_export_onto_its_own_source_is_refused(
    stem: Path, tmp_path: Path, force: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(stem, target_is_directory=True)
    (stem / "manifest.json").write_text("{}")  # the bundle that --force would replace
    (tmp_path / "manifest.json").write_text("{}")
    monkeypatch.chdir(stem)
    for out in (stem, tmp_path / "link", tmp_path, Path(), Path("..") / "stem", stem / "a" / ".."):
        refused(
            partial(stem_edge.export_bundle, stem, out, force=force),
            ExportError,
            "is or holds",
            kept=[tmp_path],
        )


def archives(folder: Path) -> None:
    (folder / "text").write_text("a")
    with zipfile.ZipFile(folder / "model.zip", "w") as file:
        file.write(folder / "text")
    np.savez(folder / "model.npz", a=np.ones(3))
    with tarfile.open(folder / "model.tar", "w") as tar:
        tar.add(folder / "text")
        link = tarfile.TarInfo("../../link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    (folder / "model.tar.gz").write_bytes(gzip.compress((folder / "model.tar").read_bytes()))
    shutil.copy(folder / "model.tar", folder / "model.pt")


@pytest.mark.parametrize(
    "name", ["model.zip", "model.npz", "model.tar", "model.tar.gz", "model.pt"]
)
def test_c16_archives_are_refused_by_name_and_not_unpacked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Bombs, links and paths in archives are harmless, because nothing unpacks them."""
    archives(tmp_path)
    command_refused(
        capsys, ["export", tmp_path / name, tmp_path / "out"], "archive", kept=[tmp_path]
    )
    (tmp_path / "folder").mkdir()
    (tmp_path / name).rename(tmp_path / "folder" / name)
    if name != "model.pt":
        not_read(tmp_path / "folder", name, "unpack the archive")


def test_c16_pipes_and_devices_are_not_waited_for(stem: Path, lingua: Path, tmp_path: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("no named pipes here")
    for path in (stem / "model.safetensors", lingua / "consolidated_stem.pth"):
        path.unlink()
        os.mkfifo(path)
        refused(partial(read_checkpoint, path.parent), CheckpointError, seconds=5)
    os.mkfifo(tmp_path / "x.pt")
    refused(lambda: read_checkpoint(tmp_path / "x.pt"), CheckpointError, seconds=5)


def header(shape: str, dtype: str = "'<i4'") -> bytes:
    text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (-(len(text) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\0" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x93NUMPY", header("(10**15,)"), header("(1000000000000000,)"), header("(-1,)"),
        header("(2,)", "'|O'") + bytes(16), header("(" * 3000), header("(2,)", "'<f4'") + bytes(8),
        header("(2,)") + b"\xff" * 8, b"PK\x03\x04" + bytes(99), b"\x80\x04N.",
        header("(__import__('os').mkdir('hacked'),)"),
    ],
    ids=range(12),
)  # fmt: skip
def test_c16_hostile_token_ids(tmp_path: Path, data: bytes) -> None:
    """Calibration ids are an untrusted numpy file."""
    path = tmp_path / "ids.npy"
    path.write_bytes(data)
    tokenizer = convert_tokenizer("bytes", None, add_bos=True)
    refused(lambda: read_token_ids(path, tokenizer, 300), InputError, path, kept=[tmp_path])
