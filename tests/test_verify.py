import json
import os
from pathlib import Path

import pytest
from test_bundle import BACKBONE, NAMES, SHARDS, make_bundle

from stem_edge.bundle import MANIFEST
from stem_edge.cli import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "model")


def one_line(err: str) -> str:
    assert err.startswith("stem-edge: ")
    assert err.count("\n") == 1
    return err


def test_a_whole_bundle(bundle: Path, capsys: Capture) -> None:
    assert main(["verify", str(bundle)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"{bundle}: {len(NAMES)} files, ")
    assert out.endswith(", all as exported\n")


def test_a_whole_bundle_as_json(bundle: Path, capsys: Capture) -> None:
    assert main(["verify", str(bundle), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out) == {"ok": True, "files": dict.fromkeys(NAMES, "ok")}


def damage(bundle: Path) -> None:
    (bundle / BACKBONE).write_bytes(b"BACKBONE")
    (bundle / SHARDS[1]).unlink()
    (bundle / "notes.txt").touch()


def test_each_wrong_file_has_a_line(bundle: Path, capsys: Capture) -> None:
    damage(bundle)
    assert main(["verify", str(bundle)]) == 1
    out, err = capsys.readouterr()
    backbone, shard, notes = out.splitlines()
    assert backbone.startswith(f"{BACKBONE}: sha256 is ")
    assert shard.startswith(f"{SHARDS[1]}: missing")
    assert notes == "notes.txt: not part of the bundle"
    message = one_line(err)
    assert f"{bundle}: 3 of {len(NAMES) + 1} files differ" in message
    assert "copy the bundle again" in message


def test_wrong_files_as_json(bundle: Path, capsys: Capture) -> None:
    damage(bundle)
    assert main(["verify", str(bundle), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    wrong = {name for name, result in report["files"].items() if result != "ok"}
    assert wrong == {BACKBONE, SHARDS[1], "notes.txt"}
    assert report["files"].keys() == {*NAMES, "notes.txt"}


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_damaged_manifest(bundle: Path, capsys: Capture, options: list[str]) -> None:
    (bundle / MANIFEST).write_bytes(b"{")
    assert main(["verify", str(bundle), *options]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{bundle / MANIFEST}: not a manifest" in one_line(err)


@pytest.mark.parametrize("name", ["none", f"model/{BACKBONE}"])
def test_no_bundle(bundle: Path, capsys: Capture, name: str) -> None:
    path = bundle.parent / name
    assert main(["verify", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{path}: no such bundle folder" in one_line(err)


@pytest.mark.parametrize("name", [b"\xff", b"a\x1b[2Jb", b"a\nok"])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_stray_file_whose_name_cannot_be_printed(
    bundle: Path, capsys: Capture, name: bytes, options: list[str]
) -> None:
    Path(os.fsdecode(bytes(bundle) + b"/" + name)).touch()
    assert main(["verify", str(bundle), *options]) == 1
    out = capsys.readouterr().out
    assert options or len(out.splitlines()) == 1
    assert "\x1b" not in out
    assert "not part of the bundle" in out
