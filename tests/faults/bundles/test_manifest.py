"""Catalogue M1 to M5 and M13: the contents of manifest.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from changing import replaced, rewrite
from contract import refused

from stem_edge.bundle.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    TOKENIZER,
    parse_manifest,
)
from stem_edge.bundle.opening import open_bundle
from stem_edge.commands.main import main
from stem_edge.errors import BundleError

PATH = Path("model/manifest.json")
SHA = "0123456789abcdef" * 4
ENTRY = {"nbytes": 0, "sha256": SHA}


@pytest.fixture(scope="module")
def manifest(tiny_bundle: Path) -> bytes:
    """The bytes of a manifest."""
    return (tiny_bundle / MANIFEST).read_bytes()


def manifest_refused(data: bytes, *naming: str) -> str:
    return refused(lambda: parse_manifest(data, PATH), BundleError, str(PATH), *naming)


def named(data: bytes, *names: str) -> bytes:
    """The manifest with more files."""
    document = json.loads(data)
    document["files"].update(dict.fromkeys(names, ENTRY))
    return json.dumps(document).encode("utf-8")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(lambda data: b"", "truncated", id="empty"),
        pytest.param(lambda data: b"\n \n", "truncated", id="blank"),
        pytest.param(lambda data: data[: len(data) // 2], "not a manifest", id="cut"),
        pytest.param(lambda data: data[:-2], "not a manifest", id="cut at the end"),
        pytest.param(lambda data: b"<!DOCTYPE html>", "byte 0", id="a web page"),
        pytest.param(lambda data: bytes(len(data)), "byte 0", id="zeros"),
        pytest.param(lambda data: b"\xef\xbb\xbf" + data, "byte 0", id="BOM"),
        pytest.param(lambda data: data.decode().encode("utf-16"), "byte 0", id="UTF-16"),
        pytest.param(lambda data: data[:9] + b"\xff" + data[9:], "utf-8", id="not UTF-8"),
        pytest.param(lambda data: data + b"{}", "trailing characters", id="two documents"),
        pytest.param(lambda data: b'"text"', "Expected `object`, got `str`", id="a text"),
    ],
)
def test_m1_a_manifest_that_is_not_json(
    manifest: bytes, damage: Callable[[bytes], bytes], said: str
) -> None:
    manifest_refused(damage(manifest), said)


def test_m2_a_newer_format(manifest: bytes) -> None:
    for version in (FORMAT_VERSION + 1, 2**31 - 1):
        message = manifest_refused(replaced(manifest, {"format_version": version}))
        assert f"bundle format {version}, expected {FORMAT_VERSION}; upgrade stem-edge" in message
    assert "upgrade" not in manifest_refused(replaced(manifest, {"format_version": 2**31}))


@pytest.mark.parametrize(
    "where", ["", "model ", "backbone ", "tables ", f"files {TOKENIZER} ", "report "]
)
def test_m2_an_unknown_feature(manifest: bytes, where: str) -> None:
    manifest_refused(replaced(manifest, {f"{where}needs": ["experts"]}), "unknown field `needs`")


@pytest.mark.parametrize("brackets", [b"[", b'{"a":', b'[{"a":'], ids=["arrays", "objects", "both"])
@pytest.mark.parametrize("before", [b"", b'{"model": ', b'{"format_version": ', b'{"x": "\\"[",'])
def test_m3_nesting_that_would_exhaust_a_parser(brackets: bytes, before: bytes) -> None:
    manifest_refused(before + brackets * 10**5)


NUMBERS = {
    "format_version": "$.format_version", "model vocab_size": "$.model.vocab_size",
    "model d_ff": "$.model.d_ff", "model stem_layers 0": "$.model.stem_layers[0]",
    "backbone block_size": "$.backbone.block_size", "tables records": "$.tables.records",
    "tables parts 0 0": "$.tables.parts[0][0]", "tables layers 0": "$.tables.layers[0]",
    f"files {TOKENIZER} nbytes": "$.files[...].nbytes",
    "report tables_nbytes": "$.report.tables_nbytes",
    "report probe_tokens 0": "$.report.probe_tokens[0]",
}  # fmt: skip


@pytest.mark.parametrize("where", NUMBERS)
@pytest.mark.parametrize("value", ["3", True, 3.0, None, [3]], ids=repr)
def test_m4_numbers_of_another_type(manifest: bytes, where: str, value: object) -> None:
    manifest_refused(replaced(manifest, {where: value}), NUMBERS[where], "Expected `int`")


@pytest.mark.parametrize("where", NUMBERS)
@pytest.mark.parametrize("value", [-1, 2**63, 2**64, 10**30], ids=repr)
def test_m4_numbers_out_of_range(manifest: bytes, where: str, value: int) -> None:
    manifest_refused(replaced(manifest, {where: value}))


def test_m4_a_model_that_is_larger_than_its_files(tiny_copy: Path) -> None:
    """No memory is allocated by a number of the manifest before it is compared with the files."""
    rewrite(tiny_copy, {"model n_layers": 200})
    said = "its weights for onnxruntime have", "expected at least"
    refused(lambda: open_bundle(tiny_copy), BundleError, tiny_copy / MANIFEST, *said)


OTHERS = [
    "../x",
    "a\x1b[2Jb",
    "CON",
    "a\0b",
    "",
    MANIFEST,
    f"./{TOKENIZER}",
    f"{TOKENIZER}/x",
    "x" * 10**5,
]
OTHERS += [f"tables.zarr/{name}" for name in ("records", "../x", "records/c/1/1", "records/c/٣/0")]


@pytest.mark.parametrize("name", OTHERS, ids=lambda name: ascii(name[:20]))
def test_m5_names_that_no_bundle_has(manifest: bytes, name: str) -> None:
    manifest_refused(named(manifest, name), "no bundle has a file called")


def test_m5_words_of_the_file_do_not_steer_a_terminal(manifest: bytes) -> None:
    for word in ("\x1b[2J", "a\nb", "\u202e", "\x9b", "x" * 10**5):
        manifest_refused(replaced(manifest, {f"model {word}": 1}))
        manifest_refused(replaced(manifest, {"model stem_ffn": word}))


def test_m5_words_of_a_report_do_not_steer_a_terminal(
    tiny_copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(tiny_copy, {"report notes": ["\x1b[2J\u202egone", "a\nfiles  none"]})
    assert main(["inspect", str(tiny_copy)]) == 0
    shown = capsys.readouterr().out
    assert "gone" in shown and all(line.isprintable() for line in shown.splitlines())
    assert "\nfiles  none" not in shown
