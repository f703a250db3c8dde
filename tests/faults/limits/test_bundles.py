"""Limits of manifests and checksums: just inside is accepted, just outside is refused."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from changing import replaced
from contract import refused, takes
from manifests import WEIGHTS_NBYTES, make_bundle
from open_files import open_files

from stem_edge.bundle import manifest as bundles
from stem_edge.bundle.checksums import verify
from stem_edge.bundle.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    TOKENIZER,
    Manifest,
    open_manifest,
    parse_manifest,
)
from stem_edge.errors import BundleError
from stem_edge.files import disk
from stem_edge.files import hashing as hashes
from stem_edge.graph.formats import BACKBONE_DATA, BackboneFormat, GgufFormat
from stem_edge.text.chat_template import MAX_CONFIG_NBYTES, has_template


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
        del document["report"][name]
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
        ("report tables_nbytes", 2**63 - 1, 2**63),
        ("report probe_tokens", [0, (1 << 24) - 1], [1 << 24]),
        ("report probe_tokens", [], [-1]),
        ("format_version", FORMAT_VERSION, FORMAT_VERSION - 1),
        ("format_version", FORMAT_VERSION, 0),
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
        assert open_manifest(bundle).format_version == FORMAT_VERSION

    takes(read, bundles.MAX_MANIFEST_NBYTES, "larger than 1048576 bytes")


def test_a_large_tokenizer_config(tmp_path: Path) -> None:
    def read(nbytes: int) -> None:
        (tmp_path / "a.json").write_bytes(b"{}".ljust(nbytes))
        has_template(tmp_path / "a.json")

    takes(read, MAX_CONFIG_NBYTES, "larger than 4194304 bytes")


# Folders that are no bundles


# Checksums


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
