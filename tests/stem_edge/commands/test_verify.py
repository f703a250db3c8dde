"""`stem-edge verify`: whether a bundle is safe to load, and why not."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from changing import seal
from installed import DEMO

from stem_edge.bundle.manifest import MANIFEST, TOKENIZER_CONFIG, open_manifest
from stem_edge.bundle.opening import open_bundle
from stem_edge.commands.main import main
from stem_edge.errors import BundleError
from stem_edge.runtime.first_load import safety
from stem_edge.runtime.first_load.safety import check_safety

Capture = pytest.CaptureFixture[str]
NAMES = open_manifest(DEMO).files
BACKBONE, SHARD = "backbone.onnx.data", "tables.zarr/records/c/0/0"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def one_line(err: str) -> str:
    assert err.startswith("stem-edge: ")
    assert err.count("\n") == 1
    return err


def test_a_whole_bundle(bundle: Path, capsys: Capture) -> None:
    assert main(["verify", str(bundle)]) == 0
    out, err = capsys.readouterr()
    assert (err, out.count("\n")) == ("", 1)
    assert out.startswith(f"{bundle}: safe to load: {len(NAMES)} files, ")
    for words in ("as exported", "a tokenizer that the library reads", "no chat template"):
        assert words in out
    assert main(["verify", str(bundle), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.pop("checked")
    files = dict.fromkeys(NAMES, "ok")
    assert report == {"ok": True, "safe": True, "reasons": [], "files": files}


@pytest.mark.parametrize("part", ["check_tables", "TextCodec"])
def test_an_invalid_part(
    part: str, bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """All checksums are correct, but the contents of a file are invalid."""

    def refuse(*_: object) -> None:
        raise BundleError(f"{bundle / BACKBONE}: holds something else; export it again")

    monkeypatch.setattr(safety, part, refuse)
    assert main(["verify", str(bundle)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    message = one_line(err)
    assert f"{bundle}: not safe to load: {BACKBONE}: holds something else; copy" in message


@pytest.mark.parametrize(("template", "works"), [("{{ messages }}", True), ("{% if %}", False)])
def test_the_chat_template(template: str, works: bool, bundle: Path) -> None:
    config = json.loads((bundle / TOKENIZER_CONFIG).read_text("utf-8"))
    told = json.dumps(config | {"chat_template": template}).encode()
    found = check_safety(seal(bundle, {TOKENIZER_CONFIG: told}))
    assert found.safe == works
    assert works or "chat_template, line 1" in found.reasons[0]
    if not works:
        (reason,) = check_safety(seal(bundle, {TOKENIZER_CONFIG: b"["})).reasons
        assert "not a JSON object" in reason


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.so", "a.so.1", "sub/numpy.py", "RUN.EXE", "script"])
def test_a_stray_program(name: str, bundle: Path) -> None:
    (bundle / "sub").mkdir()
    (bundle / name).touch()
    if name == "script":
        (bundle / name).chmod(0o700)
    found = check_safety(bundle)
    assert [found.files[name]] == [reason.removeprefix(f"{name}: ") for reason in found.reasons]
    assert "something executable" in found.files[name]
    assert found.files[name].startswith("not part of the bundle")
    assert found.advice == "remove what is not part of the bundle"


def test_each_wrong_file_has_a_line(bundle: Path, capsys: Capture) -> None:
    (bundle / BACKBONE).write_bytes(bytes(NAMES[BACKBONE].nbytes))
    (bundle / SHARD).unlink()
    (bundle / "notes.txt").touch()
    assert main(["verify", str(bundle)]) == 1
    out, err = capsys.readouterr()
    assert out.startswith(f"{SHARD}: missing") and out.count("\n") == 1
    message = one_line(err)
    assert f"{bundle}: not safe to load: {BACKBONE}: sha256 is " in message
    assert "(and 1 more, above); copy the bundle again" in message
    assert main(["verify", str(bundle), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is report["safe"] is False
    wrong = {name for name, result in report["files"].items() if result != "ok"}
    assert wrong == {BACKBONE, SHARD, "notes.txt"}
    assert len(report["reasons"]) == 2
    assert report["files"].keys() == {*NAMES, "notes.txt"}


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_damaged_manifest(bundle: Path, capsys: Capture, options: list[str]) -> None:
    (bundle / MANIFEST).write_bytes(b"{")
    assert main(["verify", str(bundle), *options]) == 1
    out, err = capsys.readouterr()
    if options:
        report = json.loads(out)
        assert (report["ok"], list(report["files"])) == (False, [MANIFEST])
    else:
        assert "not safe to load: manifest.json: not a manifest" in one_line(err)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["README.md", ".gitattributes", ".DS_Store", "tables.zarr/x"])
def test_files_that_hubs_and_systems_add_are_ignored(name: str, bundle: Path) -> None:
    (bundle / name).touch()
    found = check_safety(bundle)
    assert found.safe
    assert found.files[name] == "not part of the bundle"
    assert "1 other files, which nothing reads" in found.checked


@pytest.mark.slow
def test_a_link_beside_the_files_is_not_ignored(bundle: Path) -> None:
    (bundle / "notes.txt").symlink_to("/etc/passwd")
    assert not check_safety(bundle).safe


@pytest.mark.parametrize("name", ["none", f"model/{BACKBONE}"])
def test_no_bundle(bundle: Path, capsys: Capture, name: str) -> None:
    path = bundle.parent / name
    assert main(["verify", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{path}: no such bundle folder" in one_line(err)


@pytest.mark.slow
@pytest.mark.parametrize("name", [b"\xff", b"a\x1b[2Jb", b"a\nok"])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_stray_file_whose_name_cannot_be_printed(
    bundle: Path, capsys: Capture, name: bytes, options: list[str]
) -> None:
    Path(os.fsdecode(bytes(bundle) + b"/" + name)).touch(0o700)
    assert main(["verify", str(bundle), *options]) == 1
    said = capsys.readouterr()
    out = said.out if options else said.err
    assert options or len(out.splitlines()) == 1
    assert "\x1b" not in out
    assert "not part of the bundle" in out


def test_a_bundle_that_cannot_be_opened(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(root: Path, tables: str | None) -> None:
        raise BundleError(f"{root}: not what it says; export it again")

    monkeypatch.setattr(safety, "open_bundle", refuse)
    found = check_safety(bundle)
    assert found.reasons == ["not what it says; export it again"]
    assert found.advice == safety.COPY_AGAIN


def test_parts_that_a_bundle_has(bundle: Path) -> None:
    opened = open_bundle(bundle)
    always = ["a tokenizer that the library reads", "no chat template"]
    said: Any = SimpleNamespace(table_format=None, model=opened.manifest.model)
    dense: Any = SimpleNamespace(file=opened.file, manifest=said)
    for one, expected in ((opened, ["1,756 records", *always]), (dense, always)):
        assert [right for right, _ in safety._parts(one, lambda count: None)] == expected


def test_what_is_harmless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    assert not safety._is_harmless(path)  # it is gone
    path.touch()
    path.chmod(0o644)
    assert safety._is_harmless(path)
    assert not safety._is_harmless(tmp_path)
    for mode in (0o100, 0o010, 0o001):
        path.chmod(0o600 | mode)
        assert safety._is_harmless(path) == (os.name != "posix")
    monkeypatch.setattr(safety, "os", SimpleNamespace(name="nt"))
    assert safety._is_harmless(path)
