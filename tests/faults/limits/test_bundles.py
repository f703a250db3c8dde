"""Limits of manifests and checksums: just inside is accepted, just outside is refused."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from changing import replaced, rewrite
from contract import judged, refused, takes
from faulty_disk import Failing, watch
from manifests import REPORT, WEIGHTS_NBYTES, make_bundle
from open_files import open_files

from stem_edge.bundle import manifest as bundles
from stem_edge.bundle.checksums import verify
from stem_edge.bundle.manifest import (
    MANIFEST,
    TABLES,
    TOKENIZER,
    FileEntry,
    Manifest,
    open_manifest,
    parse_manifest,
)
from stem_edge.bundle.opening import MAX_SMALL_NBYTES, open_bundle
from stem_edge.errors import BundleError
from stem_edge.files import disk
from stem_edge.files import hashing as hashes
from stem_edge.graph import formats
from stem_edge.graph.decode import PREFILL_DATA
from stem_edge.graph.formats import BACKBONE_DATA, BackboneFormat, GgufFormat

SHA = "0" * 64
Fields = dict[str, Any]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "model")


def changed(bundle: Path, where: str, value: object) -> Manifest:
    """Change a value of the manifest and parse it."""
    data = replaced((bundle / MANIFEST).read_bytes(), {where: value})
    return parse_manifest(data, bundle / MANIFEST)


# The manifest


def test_what_a_manifest_need_not_say(bundle: Path) -> None:
    """Manifests of earlier exports lack these fields."""
    document = json.loads((bundle / MANIFEST).read_bytes())
    for name in ("asymmetric", "balanced", "kinds", "prefill", "quantizer"):
        del document["backbone"][name]
    for name in ("rare_tables", "indexed", "gguf"):
        del document[name]
    for name in ("prefill_divergence", "divergence_99", "agreement", "notes"):
        del document["reports"]["onnxruntime"][name]
    found = parse_manifest(json.dumps(document).encode(), bundle / MANIFEST)
    assert found == open_manifest(bundle)
    assert found.backbone == BackboneFormat(
        weights="int4", head="int8", block_size=32, kinds={}, asymmetric=False, quantizer="rtn"
    )
    assert (found.rare_tables, found.indexed, found.gguf) == (None, False, None)
    assert (found.report.agreement, found.report.notes) == (None, ())
    assert not GgufFormat(weights="f32").importance


@pytest.mark.parametrize(
    ("where", "inside", "outside"),
    [
        (f"files {TOKENIZER} nbytes", 0, -1),
        (f"files {TOKENIZER} nbytes", 2**62, 2**63 - 1),  # together with the others too many
        (f"files {TOKENIZER} sha256", "f" * 64, "f" * 63),
        (f"files {TOKENIZER} sha256", "a" * 64, "a" * 65),
        (f"files {TOKENIZER} sha256", "0" * 64, "A" * 64),
        (f"files {TOKENIZER} sha256", "9" * 64, "g" * 64),
        ("backbone block_size", 16, 15),
        ("backbone block_size", 256, 257),
        ("reports onnxruntime checkpoint_nbytes", 2**63 - 1, 2**63),
        ("reports onnxruntime probe_tokens", [0, (1 << 24) - 1], [1 << 24]),
        ("reports onnxruntime probe_tokens", [], [-1]),
        ("format_version", 4, 3),
        ("format_version", 4, 0),
    ],
)
def test_the_edges_of_each_field(bundle: Path, where: str, inside: object, outside: object) -> None:
    changed(bundle, where, inside)
    refused(lambda: changed(bundle, where, outside), BundleError, bundle / MANIFEST)


def test_m13_the_sum_of_all_sizes(bundle: Path) -> None:
    rest = open_manifest(bundle).nbytes - 2
    name = f"files {TOKENIZER} nbytes"
    assert changed(bundle, name, 2**63 - 1 - rest).nbytes == 2**63 - 1
    refused(lambda: changed(bundle, name, 2**63 - rest), BundleError, str(2**63))


def test_the_size_of_a_manifest(bundle: Path) -> None:
    whole = (bundle / MANIFEST).read_bytes()

    def read(nbytes: int) -> None:
        (bundle / MANIFEST).write_bytes(whole.ljust(nbytes))
        assert open_manifest(bundle).format_version == 4

    takes(read, bundles.MAX_MANIFEST_NBYTES, "larger than 1048576 bytes")


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_weights_are_as_many_bytes_as_the_model_has(bundle: Path, more: int) -> None:
    nbytes = WEIGHTS_NBYTES + more
    os.truncate(bundle / BACKBONE_DATA, nbytes)
    rewrite(bundle, {f"files {BACKBONE_DATA} nbytes": nbytes})
    said = (bundle / BACKBONE_DATA, f"{nbytes} bytes", f"take {WEIGHTS_NBYTES}")
    judged(lambda: open_bundle(bundle), not more, BundleError, *said)


@pytest.mark.parametrize("name", sorted(MAX_SMALL_NBYTES))
def test_a_small_file_that_is_large(bundle: Path, name: str) -> None:
    """The file is sparse, because none of it is read."""

    def read(nbytes: int) -> None:
        os.truncate(bundle / name, nbytes)
        rewrite(bundle, {f"files {name} nbytes": nbytes})
        open_bundle(bundle)

    most = MAX_SMALL_NBYTES[name]
    takes(read, most, f"{name}: {most + 1} bytes found, expected at most {most}")


def test_types_of_each_kind_of_matrix() -> None:
    plain = BackboneFormat(weights="int4", head="int8", block_size=32)
    bits = {kind: plain.bits(kind) for kind in formats.MATRIX_KINDS}
    in_eight = (*formats.VOCABULARY_KINDS, *formats.SMALL_KINDS)
    assert bits == dict.fromkeys(formats.MATRIX_KINDS, 4) | dict.fromkeys(in_eight, 8)
    mixed = BackboneFormat(weights="fp32", head="fp32", block_size=32, kinds={"head": "int8"})
    assert (mixed.type_of("head"), mixed.type_of("embedding")) == ("int8", "fp32")
    assert mixed.quantized
    assert not BackboneFormat(weights="fp32", head="fp32", block_size=32).quantized


def both_engines(bundle: Path) -> Fields:
    """Fields of a manifest with both backbones and a prefill graph."""
    manifest = open_manifest(bundle)
    names = [bundles.GGUF, PREFILL_DATA]
    assert manifest.backbone is not None
    return {
        "backbone": msgspec.structs.replace(manifest.backbone, prefill=True),
        "gguf": GgufFormat(weights="q8_0"),
        "files": manifest.files | {name: FileEntry(5000, SHA) for name in names},
        "reports": {"ggml": msgspec.structs.replace(REPORT, divergence=1.0), "onnxruntime": REPORT},
    }


def test_a_bundle_for_both_engines(bundle: Path) -> None:
    plain = open_manifest(bundle)
    both = msgspec.structs.replace(plain, **both_engines(bundle))
    assert both.engines == ("onnxruntime", "ggml")
    assert (both.report, plain.report) == (REPORT, REPORT)
    assert (both.has_prefill, plain.has_prefill) == (True, False)
    added = {bundles.GGUF, PREFILL_DATA}
    assert set(both.required_files()) == set(plain.required_files()) | added
    assert both.nbytes == plain.nbytes + 10000
    only = msgspec.structs.replace(both, backbone=None, reports={"ggml": REPORT})
    assert (only.engines, only.has_prefill) == (("ggml",), False)
    assert BACKBONE_DATA not in only.required_files()
    for name in sorted(added):
        files = {n: entry for n, entry in both.files.items() if n != name}
        with pytest.raises(ValueError, match=f"no entry for {name}"):
            msgspec.structs.replace(both, files=files)


@pytest.mark.parametrize("engines", [[], ["ggml"], ["onnxruntime", "ggml"]])
def test_backbones_without_reports_and_reports_without_backbones(
    bundle: Path, engines: list[str]
) -> None:
    reports = dict.fromkeys(engines, REPORT)
    with pytest.raises(ValueError, match="reports of"):
        msgspec.structs.replace(open_manifest(bundle), reports=reports)
    if not engines:
        with pytest.raises(ValueError, match="reports of"):
            msgspec.structs.replace(open_manifest(bundle), backbone=None, reports={})


# Folders that are no bundles


def test_an_export_that_was_cut_off_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, working = tmp_path / "out", tmp_path / ".stem-edge-out"
    refused(lambda: open_bundle(out), BundleError, out, "give the folder of an export")
    working.mkdir()
    refused(lambda: open_bundle(out), BundleError, out, "is not finished")
    (tmp_path / ".stem-edge-out-old").mkdir()
    refused(lambda: open_bundle(out), BundleError, out, "rename .stem-edge-out-old to out")
    working.rmdir()
    monkeypatch.chdir(tmp_path)
    refused(lambda: open_bundle("out"), BundleError, "rename .stem-edge-out-old to out")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_manifest_that_cannot_be_read(
    bundle: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch(monkeypatch, ["open_file"], Failing(0, number, for_ever=True))
    refused(
        lambda: open_bundle(bundle), BundleError, bundle / MANIFEST, os.strerror(number), "manifest"
    )


# Checksums


@pytest.mark.parametrize("piece", [1000, WEIGHTS_NBYTES, WEIGHTS_NBYTES + 1, 1 << 22])
def test_every_byte_is_hashed_in_pieces(
    bundle: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes, "HASH_PIECE_NBYTES", piece)
    counted, before = list[int](), open_files()
    results = verify(bundle, counted.append)
    assert set(results.values()) == {"ok"}
    assert list(results) == sorted(open_manifest(bundle).files)
    assert sum(counted) == open_manifest(bundle).nbytes
    assert (max(counted) == piece) == (piece <= WEIGHTS_NBYTES)
    assert open_files() <= before


@pytest.mark.parametrize(
    ("at", "number", "said"),
    [
        (0, errno.EIO, "cannot read 1000 bytes at byte 0 (Input/output error); check the storage"),
        (1000, errno.EIO, "cannot read 1000 bytes at byte 1000 (Input/output error); check the"),
        (1500, None, "read 500 of 1000 bytes at byte 1000; the file was cut meanwhile; copy"),
    ],
)
def test_a_file_that_fails_or_is_cut_while_it_is_hashed(
    bundle: Path, at: int, number: int | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, before = disk.fill, open_files()

    def fail(descriptor: int, buffer: memoryview, offset: int) -> int:
        if disk.size(descriptor) != WEIGHTS_NBYTES or offset + len(buffer) <= at:
            return fill(descriptor, buffer, offset)
        if number is not None:
            raise OSError(number, os.strerror(number))
        return fill(descriptor, buffer[: max(0, at - offset)], offset)

    monkeypatch.setattr(hashes, "HASH_PIECE_NBYTES", 1000)
    monkeypatch.setattr(disk, "fill", fail)
    wrong = {name: found for name, found in verify(bundle).items() if found != "ok"}
    assert list(wrong) == [BACKBONE_DATA]
    assert wrong[BACKBONE_DATA].startswith(said)
    assert open_files() <= before


def test_a_folder_that_cannot_be_listed(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refuse(path: Path) -> object:
        if Path(path).name == "records":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    refused(lambda: verify(bundle), BundleError, bundle / TABLES / "records", "permissions")
