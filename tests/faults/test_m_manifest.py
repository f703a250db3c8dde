"""Catalogue M1 to M5 and M13: what manifest.json says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from contract import command_refused, refused

from stem_edge.bundle import (
    FORMAT_VERSION,
    MANIFEST,
    MAX_MANIFEST_NBYTES,
    TOKENIZER,
    open_bundle,
    parse_manifest,
)
from stem_edge.cli import main
from stem_edge.errors import BundleError
from stem_edge.file_names import MAX_FILES
from stem_edge.strict_json import MAX_DEPTH

PATH = Path("model/manifest.json")
SHA = "0123456789abcdef" * 4
ENTRY = {"nbytes": 0, "sha256": SHA}


@pytest.fixture(scope="module")
def manifest(tiny_bundle: Path) -> bytes:
    """The bytes of a manifest."""
    return (tiny_bundle / MANIFEST).read_bytes()


def manifest_refused(data: bytes, *naming: str) -> str:
    return refused(lambda: parse_manifest(data, PATH), BundleError, str(PATH), *naming)


def changed(data: bytes, where: str, value: object) -> bytes:
    """The manifest with another value at a path of it."""
    document: Any = json.loads(data)
    *parents, last = where.split(" ")
    target = document
    for name in parents:
        target = target[int(name) if isinstance(target, list) else name]
    target[int(last) if isinstance(target, list) else last] = value
    return json.dumps(document).encode()


def named(data: bytes, *names: str) -> bytes:
    """The manifest with more files."""
    document = json.loads(data)
    document["files"].update(dict.fromkeys(names, ENTRY))
    return json.dumps(document).encode("utf-8")


def test_m1_a_manifest_that_is_missing(
    tiny_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_bundle, copy, ignore=shutil.ignore_patterns(MANIFEST))
    refused(lambda: open_bundle(copy), BundleError, copy, "it has no manifest.json", kept=[copy])
    command_refused(capsys, ["inspect", copy], copy, "not a bundle", kept=[copy])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(lambda data: b"", "it is empty", id="empty"),
        pytest.param(lambda data: b"\n \n", "it is empty", id="blank"),
        pytest.param(lambda data: data[: len(data) // 2], "not a manifest", id="cut"),
        pytest.param(lambda data: data[:-2], "not a manifest", id="cut at the end"),
        pytest.param(lambda data: b"<!DOCTYPE html>", "char 0", id="a web page"),
        pytest.param(lambda data: bytes(len(data)), "char 0", id="zeros"),
        pytest.param(lambda data: b"\xef\xbb\xbf" + data, "byte order mark", id="BOM"),
        pytest.param(lambda data: data.decode().encode("utf-16"), "utf-8", id="UTF-16"),
        pytest.param(lambda data: data[:9] + b"\xff" + data[9:], "position 9", id="not UTF-8"),
        pytest.param(lambda data: data + b"{}", "Extra data", id="two documents"),
        pytest.param(lambda data: b'"text"', "Expected `object`, got `str`", id="a text"),
    ],
)
def test_m1_a_manifest_that_is_no_json(
    manifest: bytes, damage: Callable[[bytes], bytes], said: str
) -> None:
    manifest_refused(damage(manifest), said)


def test_m2_a_newer_format(manifest: bytes) -> None:
    for version in (FORMAT_VERSION + 1, 2**31 - 1):
        message = manifest_refused(changed(manifest, "format_version", version))
        assert f"bundle format {version} is newer" in message
        assert message.endswith("upgrade stem-edge")
    assert "upgrade" not in manifest_refused(changed(manifest, "format_version", 2**31))


REPORT = "reports onnxruntime"


@pytest.mark.parametrize(
    "where", ["", "model ", "backbone ", "tables ", f"files {TOKENIZER} ", f"{REPORT} "]
)
def test_m2_a_feature_that_is_not_known(manifest: bytes, where: str) -> None:
    manifest_refused(changed(manifest, f"{where}needs", ["experts"]), "unknown field `needs`")


def test_m2_a_feature_of_a_measured_kind(manifest: bytes) -> None:
    kind = next(iter(json.loads(manifest)["reports"]["onnxruntime"]["errors"]))
    data = changed(manifest, f"{REPORT} errors {kind} needs", 1)
    manifest_refused(data, "unknown field `needs`")


def test_m3_a_manifest_of_a_gigabyte(tiny_bundle: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_bundle, copy)
    with (copy / MANIFEST).open("r+b") as file:
        file.truncate(1 << 30)
    refused(lambda: open_bundle(copy), BundleError, copy / MANIFEST, f"{MAX_MANIFEST_NBYTES}")


def test_m3_a_manifest_at_the_limit_of_its_size(manifest: bytes) -> None:
    parse_manifest(manifest.ljust(MAX_MANIFEST_NBYTES), PATH)
    manifest_refused(manifest.ljust(MAX_MANIFEST_NBYTES + 1), "larger than")


def test_m3_a_million_files(manifest: bytes) -> None:
    manifest_refused(named(manifest, *map(str, range(10**5))), "larger than")
    # So short that there are more of them than may be, in fewer bytes than may be.
    entries = ",".join(f'"{n}":{{"nbytes":0,"sha256":"{SHA}"}}' for n in range(MAX_FILES))
    data = json.dumps(json.loads(manifest), separators=(",", ":"))
    data = data.replace('"files":{', f'"files":{{{entries},')
    assert len(data) < MAX_MANIFEST_NBYTES
    manifest_refused(data.encode(), f"expected at most {MAX_FILES}")


@pytest.mark.parametrize("brackets", [b"[", b'{"a":', b'[{"a":'], ids=["arrays", "objects", "both"])
@pytest.mark.parametrize("before", [b"", b'{"model": ', b'{"format_version": ', b'{"x": "\\"[",'])
def test_m3_nesting_that_would_exhaust_a_parser(brackets: bytes, before: bytes) -> None:
    manifest_refused(before + brackets * 10**5, f"nested deeper than {MAX_DEPTH}")


def test_m3_texts_that_never_end_take_no_time() -> None:
    for data in (b'"' * 10**6, b'\\"' * 500_000, b'"\\' * 500_000, b'"' + b"\\" * 10**6):
        manifest_refused(data, "not a manifest")


@pytest.mark.parametrize(
    "where", ['"files": {', '"model": {', '"tables": {', '"tokenizer.json": {', "{"]
)
def test_m3_a_field_that_is_there_twice(manifest: bytes, where: str) -> None:
    field = f'{where}"twice": 1, "twice": 1,'
    data = manifest.replace(where.encode(), field.encode(), 1)
    manifest_refused(data, "'twice' is there more than once")


HUGE = "9" * 5000
NUMBERS = {
    "format_version": "$.format_version", "model vocab_size": "$.model.vocab_size",
    "model d_ff": "$.model.d_ff", "model stem_layers 0": "$.model.stem_layers[0]",
    "backbone block_size": "$.backbone.block_size", "tables records": "$.tables.records",
    f"files {TOKENIZER} nbytes": "$.files[...].nbytes",
    "reports onnxruntime tables_nbytes": "$.reports[...].tables_nbytes",
    "reports onnxruntime probe_tokens 0": "$.reports[...].probe_tokens[0]",
}  # fmt: skip


@pytest.mark.parametrize("where", NUMBERS)
@pytest.mark.parametrize("value", ["3", True, 3.0, None, [3]], ids=repr)
def test_m4_numbers_of_another_type(manifest: bytes, where: str, value: object) -> None:
    manifest_refused(changed(manifest, where, value), NUMBERS[where], "Expected `int`")


@pytest.mark.parametrize("where", NUMBERS)
@pytest.mark.parametrize("value", [-1, 2**63, 2**64, 10**30], ids=repr)
def test_m4_numbers_out_of_range(manifest: bytes, where: str, value: int) -> None:
    manifest_refused(changed(manifest, where, value))


@pytest.mark.parametrize("text", ["1e400", "-1e400", "NaN", "Infinity", "-Infinity", HUGE, "0x10"])
@pytest.mark.parametrize("field", ["norm_eps", "rope_theta", "logit_softcap", "vocab_size"])
def test_m4_numbers_that_are_none(manifest: bytes, text: str, field: str) -> None:
    data = changed(manifest, f"model {field}", "HERE").replace(b'"HERE"', text.encode())
    manifest_refused(data, "not a manifest")


@pytest.mark.parametrize(
    "changes",
    [
        *[{"model vocab_size": 2**24}, {"model dim": 2**20}, {"model d_ff": 2**20}],
        *[{"model n_heads": 2**16}, {"model head_dim": 2**20}, {"model n_layers": 2**12}],
        {"tables parts": [[2**62]]}, {"tables parts": [[2**31, 2**31]]},
        {"tables parts": [[16]] * 1000}, {"tables parts": [[1] * 1000]}, {"tables layers": [2**62]},
    ],
    ids=str,
)  # fmt: skip
def test_m4_sizes_that_would_need_more_than_there_is(
    tiny_bundle: Path, tmp_path: Path, manifest: bytes, changes: dict[str, object]
) -> None:
    """No number of the manifest sizes anything before it was compared to what the files have."""
    copy = tmp_path / "copy"
    shutil.copytree(tiny_bundle, copy)
    for where, value in changes.items():
        manifest = changed(manifest, where, value)
    (copy / MANIFEST).write_bytes(manifest)
    refused(lambda: open_bundle(copy), BundleError, copy / MANIFEST)


def test_m4_a_model_that_is_larger_than_its_files(
    tiny_bundle: Path, tmp_path: Path, manifest: bytes
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_bundle, copy)
    (copy / MANIFEST).write_bytes(changed(manifest, "model n_layers", 200))
    message = refused(lambda: open_bundle(copy), BundleError, copy / MANIFEST)
    assert "its backbone for onnxruntime has" in message and "expected at least" in message


@pytest.mark.parametrize("name", ["../x", "a\x1b[2Jb", "CON", "a\0b"], ids=ascii)
def test_m5_names_that_are_no_plain_paths(manifest: bytes, name: str) -> None:
    """All kinds of them: test_limits_names.py."""
    manifest_refused(named(manifest, name), "file name")


@pytest.mark.parametrize(
    "names",
    [
        ("Tokenizer.json",),
        ("MANIFEST.json",),
        ("Tables.zarr/x",),
        ("stra\u00dfe", "STRASSE"),
        ("\u00e9", "\u00c9"),
        ("k", "\u212a"),  # the sign of Kelvin
        ("x/y", "X/z"),
    ],
    ids=ascii,
)
def test_m5_names_that_some_systems_hold_for_one(manifest: bytes, names: tuple[str, ...]) -> None:
    manifest_refused(named(manifest, *names))


def test_m5_a_name_that_is_a_file_and_a_folder(manifest: bytes) -> None:
    manifest_refused(named(manifest, f"{TOKENIZER}/x"), TOKENIZER, "a file and of a folder")
    manifest_refused(named(manifest, f"{MANIFEST}/x"), MANIFEST, "a file and of a folder")
    manifest_refused(named(manifest, MANIFEST), MANIFEST)


def test_m5_words_of_the_file_do_not_steer_a_terminal(manifest: bytes) -> None:
    for word in ("\x1b[2J", "a\nb", "\u202e", "\x9b", "x" * 10**5):
        manifest_refused(changed(manifest, f"model {word}", 1))
        manifest_refused(changed(manifest, "model stem_ffn", word))


def test_m5_words_of_a_report_do_not_steer_a_terminal(
    tiny_bundle: Path, tmp_path: Path, manifest: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_bundle, copy)
    manifest = changed(manifest, f"{REPORT} notes", ["\x1b[2Jgone", "a\nfiles  none"])
    manifest = changed(manifest, f"{REPORT} errors", {"\x1b[2J\u202e": {"worst": 0, "mean": 0}})
    (copy / MANIFEST).write_bytes(manifest)
    assert main(["inspect", str(copy)]) == 0
    shown = capsys.readouterr().out
    assert "gone" in shown and all(line.isprintable() for line in shown.splitlines())
    assert "\nfiles  none" not in shown
