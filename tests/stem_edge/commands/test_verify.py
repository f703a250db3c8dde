"""`stem-edge verify`: whether a bundle is safe to load, and why not."""

import json
import shutil
from pathlib import Path

import pytest
from changing import seal
from installed import DEMO

from stem_edge.bundle.manifest import MANIFEST, TOKENIZER_CONFIG, open_manifest
from stem_edge.commands.main import main
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


@pytest.mark.parametrize("name", ["tables.zarr/records/zarr.json", "tokenizer.json"])
def test_an_invalid_part(name: str, bundle: Path, capsys: Capture) -> None:
    """All checksums are correct, but the contents of a file are invalid."""
    seal(bundle, {name: b"{}"})
    assert main(["verify", str(bundle)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{bundle}: not safe to load: " in one_line(err) and name in err


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


@pytest.mark.parametrize("name", ["none", f"model/{BACKBONE}"])
def test_no_bundle(bundle: Path, capsys: Capture, name: str) -> None:
    path = bundle.parent / name
    assert main(["verify", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{path}: no such bundle folder" in one_line(err)
