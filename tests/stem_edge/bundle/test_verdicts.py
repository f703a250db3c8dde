"""Verdicts on bundles: what they apply to, how long they count, and how they get lost."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import pytest
from installed import DEMO

from stem_edge import __version__
from stem_edge.bundle import keeping
from stem_edge.bundle.keeping import check_place, keep_good, keep_verdict
from stem_edge.bundle.manifest import BACKBONE_GRAPH, GGUF, MANIFEST, TOKENIZER
from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.bundle.verdicts import Verdict, Verdicts, read_verdict, versions
from stem_edge.errors import BundleError
from stem_edge.files import disk
from stem_edge.files import hashing as hashes
from stem_edge.ggml import installed
from stem_edge.system.user_folder import KEY_CHARS


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return open_bundle(Path(shutil.copytree(DEMO, tmp_path / "model")))


@pytest.fixture
def records(bundle: Bundle, tmp_path: Path) -> Verdicts:
    return Verdicts(bundle, "onnxruntime", tmp_path / "cache")


def test_files_that_go_to_native_code(records: Verdicts, tiny_gguf: Path, tmp_path: Path) -> None:
    found = records.native_files()
    files = records.bundle.manifest.files
    others = {name for name in files if not name.startswith("tables.zarr/")}
    assert set(found) == others - {BACKBONE_GRAPH}
    assert len(found) == len(set(found))
    assert records.nbytes(found) == sum(
        (records.bundle.path / name).stat().st_size for name in found
    )
    other = Verdicts(open_bundle(tiny_gguf), "ggml", tmp_path)
    assert other.native_files() == [TOKENIZER, "tokenizer_config.json", GGUF]


def test_what_a_verdict_says(records: Verdicts) -> None:
    assert records.verdict() is None
    keep_verdict(records, "odd")
    found = records.verdict()
    assert found == Verdict(
        format=3,
        bundle=str(records.bundle.path.resolve()),
        engine="onnxruntime",
        reason="odd",
    )
    kept = keep_verdict(records, prefill_from_decode=0.5)
    found = records.verdict()
    assert found == kept
    assert (found.reason, found.until, found.prefill_from_decode) == ("", None, 0.5)
    assert records.verdict_file.parent.name == "trials"
    assert records.place_file.parent.name == "places"
    assert len(records.verdict_file.stem) == KEY_CHARS


@pytest.mark.parametrize(
    ("passed", "counts"),
    [(0, True), (3600, True), (3600.5, False), (3601, False), (-2, False)],
)
def test_what_is_not_certain_counts_for_an_hour(
    passed: float, counts: bool, records: Verdicts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 10_000.5)
    keep_verdict(records, "slow", certain=False)
    found = read_verdict(records.verdict_file)
    assert found is not None
    assert found.until == 13_600
    monkeypatch.setattr(time, "time", lambda: 10_000.0 + passed)
    assert (records.verdict() is not None) == counts


@pytest.mark.parametrize("change", ["size", "mtime", "inode", "manifest"])
def test_a_place_is_known_until_a_file_is_another(change: str, records: Verdicts) -> None:
    check_place(records)
    assert records.place_is_known()
    path = records.bundle.path / (MANIFEST if change == "manifest" else TOKENIZER)
    data, status = path.read_bytes(), path.stat()
    if change == "inode":
        copy = path.with_name("copy")
        shutil.copy2(path, copy)
        copy.replace(path)
    elif change == "mtime":
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1000))
    else:
        path.write_bytes(data + b" ")
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    cache = records.place_file.parents[1]
    assert not Verdicts(records.bundle, "onnxruntime", cache).place_is_known()


def test_hashing_tells_how_far_it_is(records: Verdicts, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(hashes, "HASH_PIECE_NBYTES", 1000)
    check_place(records, told.append)
    assert sum(told) == records.nbytes(records.hashed_files())
    assert max(told) == 1000
    told.clear()
    check_place(records, told.append)
    assert not told
    check_place(records, told.append, anew=True)
    assert sum(told) == records.nbytes(records.hashed_files())


def test_a_file_that_differs_or_cannot_be_read_is_named(
    records: Verdicts, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = records.bundle.path / TOKENIZER
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"!")
    with pytest.raises(BundleError, match=rf"^{path}: sha256 is \w+, expected \w+; copy or"):
        check_place(records)
    path.unlink()
    with pytest.raises(BundleError, match=rf"^{path}: missing or unreadable \(No such file"):
        check_place(records)
    with pytest.raises(BundleError, match=r"model: cannot read \(No such file.*\); copy or export"):
        Verdicts(records.bundle, "onnxruntime", None)
    assert not records.place_is_known()


def test_a_record_that_is_too_long_is_ignored(records: Verdicts) -> None:
    keep_verdict(records, "x" * 2**15)
    assert records.verdict() is not None
    keep_verdict(records, "x" * 2**17)
    assert records.verdict() is None


@pytest.mark.parametrize("data", [b"", b"\xff", b"[" * 60_000, b'{"format": 3}', b"[]"])
def test_damaged_records_are_ignored(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert read_verdict(path) is None
    path.write_bytes(data)
    assert read_verdict(path) is None


@pytest.mark.parametrize(
    ("before", "after", "known"),
    [
        (b'"format":3', b'"format":3', True),
        (b'"format":3', b'"format":2', False),
        (b"{", b'{"other":1,', False),
    ],
)
def test_another_format(before: bytes, after: bytes, known: bool, records: Verdicts) -> None:
    keep_verdict(records)
    check_place(records)
    for path in (records.verdict_file, records.place_file):
        path.write_bytes(path.read_bytes().replace(before, after, 1))
        assert (read_verdict(path) is not None) == known


def test_a_full_disk_keeps_nothing(records: Verdicts, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(keeping, "write_whole", full)
        keep_verdict(records)
        check_place(records)
    assert records.verdict() is None
    assert not records.place_is_known()


def test_what_has_run_here_is_good(bundle: Bundle, tmp_path: Path) -> None:
    keep_good(bundle, "onnxruntime", tmp_path)
    found = Verdicts(bundle, "onnxruntime", tmp_path).verdict()
    assert found is not None
    assert found.reason == ""
    (bundle.path / MANIFEST).unlink()
    keep_good(bundle, "onnxruntime", tmp_path)  # although it is gone already


def test_versions_of_what_reads_a_bundle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import onnxruntime
    import tokenizers

    found = {"stem-edge": __version__, "tokenizers": tokenizers.__version__}
    assert versions("onnxruntime") == found | {"onnxruntime": onnxruntime.__version__}
    library = tmp_path / "libggml.so"
    library.touch()
    monkeypatch.setattr(installed, "library_path", lambda: library)
    first = versions("ggml")
    assert first["ggml"]
    library.write_bytes(b"other")
    assert versions("ggml")["ggml"] != first["ggml"]
    library.unlink()
    assert versions("ggml") == found | {"ggml": ""}
    monkeypatch.setattr(installed, "library_path", lambda: None)
    assert versions("ggml") == found | {"ggml": ""}
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert versions("ggml")["tokenizers"] == ""


def test_files_are_read_through_the_seam(
    records: Verdicts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, *_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(disk, "read_file", fails)
    with pytest.raises(BundleError, match="Input/output error"):
        Verdicts(records.bundle, "onnxruntime", None)
    monkeypatch.setattr(disk, "open_file", fails)
    with pytest.raises(BundleError, match="Input/output error"):
        check_place(records)
