"""`stem-edge verify`: whether every file of a bundle is as exported."""

import json
import shutil
from pathlib import Path

import pytest
from installed import DEMO

from stem_edge.bundle.manifest import MANIFEST, open_manifest
from stem_edge.commands.main import main

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
    assert out.startswith(f"{bundle}: {len(NAMES)} files, ") and out.endswith(", as exported\n")
    assert main(["verify", str(bundle), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == {"ok": True, "files": dict.fromkeys(NAMES, "ok")}


def test_each_wrong_file_has_a_line(bundle: Path, capsys: Capture) -> None:
    (bundle / BACKBONE).write_bytes(bytes(NAMES[BACKBONE].nbytes))
    (bundle / SHARD).unlink()
    (bundle / "notes.txt").touch()
    assert main(["verify", str(bundle)]) == 1
    out, err = capsys.readouterr()
    first, second = out.splitlines()
    assert first.startswith(f"{BACKBONE}: sha256 is ") and second.startswith(
        f"{SHARD}: cannot read"
    )
    told = f"{bundle}: 2 of {len(NAMES)} files are not as exported; copy the bundle again"
    assert told in one_line(err)
    assert main(["verify", str(bundle), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    wrong = {name for name, result in report["files"].items() if result != "ok"}
    assert wrong == {BACKBONE, SHARD}
    assert report["files"].keys() == NAMES.keys()


def test_a_damaged_manifest(bundle: Path, capsys: Capture) -> None:
    (bundle / MANIFEST).write_bytes(b"{")
    assert main(["verify", str(bundle)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "manifest.json: not a manifest" in one_line(err)


@pytest.mark.parametrize("name", ["none", f"model/{BACKBONE}"])
def test_no_bundle(bundle: Path, capsys: Capture, name: str) -> None:
    path = bundle.parent / name
    assert main(["verify", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{path}: no such bundle folder" in one_line(err)
