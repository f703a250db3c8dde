"""Prepared backbones: the same logits, made only once, and loading without them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from loading import load_fixed

import stem_edge
from stem_edge.bundle.opening import open_bundle
from stem_edge.commands.main import main
from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import RECORD, prepared_folder

IDS = [256, *b"twelve tokens or so"]
Capture = pytest.CaptureFixture[str]


def prepare(bundle: Path, cache_dir: Path) -> int:
    """Prepare a bundle, small as it is, for one thread; return the status of the command."""
    return main(["prepare", str(bundle), "--cache-dir", str(cache_dir), "--threads", "1"])


def folders(cache_dir: Path) -> list[Path]:
    """Return the folders of prepared backbones, unfinished ones too."""
    return [path for path in (cache_dir / "prepared").glob("*") if path.is_dir()]


@pytest.fixture(scope="module")
def bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "bundle"
    stem_edge.export_bundle(tiny_checkpoint, out, prefill_graph=True)
    return out


@pytest.fixture(scope="module")
def made(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the prepacked backbone. Do not change it."""
    folder = tmp_path_factory.mktemp("made")
    assert prepare(bundle, folder) == 0
    return folder


@pytest.fixture
def own(made: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    shutil.copytree(made, tmp_path / "own")
    return tmp_path / "own"


def test_a_small_backbone_is_not_prepared(bundle: Path, tmp_path: Path) -> None:
    with load_fixed(bundle, cache_dir=tmp_path):
        pass
    assert not (tmp_path / "prepared").exists()


def test_a_full_disk(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert prepare(bundle, tmp_path) == 1
    said = capsys.readouterr().err
    assert "takes " in said and "1 kB are free" in said and not folders(tmp_path)


# Ends after 20,000 bytes of a file, as where a quota is used up.
LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from stem_edge.commands.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
def test_a_failure_leaves_nothing(bundle: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, "prepare", str(bundle), "--cache-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "; this takes up to " in done.stderr, done.stderr
    assert not folders(tmp_path)
    assert prepare(bundle, tmp_path) == 0


def test_what_a_killed_attempt_left_goes(bundle: Path, tmp_path: Path, made: Path) -> None:
    (done,) = folders(made)
    left = tmp_path / "prepared" / f".making-{done.name}"
    left.mkdir(parents=True)
    (left / "step.onnx.data").write_bytes(bytes(1000))
    assert prepare(bundle, tmp_path) == 0
    assert [folder.name for folder in folders(tmp_path)] == [done.name]


def test_several_prepare_once(bundle: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stem_edge", "prepare", str(bundle), "--cache-dir"]
    running = [
        subprocess.Popen([*command, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0] * 3 and len(folders(tmp_path)) == 1
    assert len({one.partition(": ")[0] for one in said}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "missing", "record", "stranger", "flipped"])
def test_a_damaged_graph_is_prepared_again(
    bundle: Path, own: Path, damage: str, capsys: Capture
) -> None:
    """Until then, loads do without."""
    (folder,) = folders(own)
    data = folder / "step.onnx.data"
    if damage == "cut":
        data.write_bytes(data.read_bytes()[:-1])
    if damage == "missing":
        data.unlink()
    if damage == "flipped":
        times = data.stat().st_atime_ns, data.stat().st_mtime_ns
        data.write_bytes(bytes([data.read_bytes()[0] ^ 1]) + data.read_bytes()[1:])
        os.utime(data, ns=times)
        os.utime(folder / RECORD, (0, 0))
    if damage == "record":
        (folder / RECORD).write_bytes(b"{")
    if damage == "stranger":
        record = json.loads((folder / RECORD).read_bytes())
        record["files"] = {"../../../etc/passwd": 1}
        (folder / RECORD).write_text(json.dumps(record))
    with load_fixed(bundle, cache_dir=own, threads=1) as model:
        expected = model.logits(IDS)
    assert prepare(bundle, own) == 0 and capsys.readouterr().out.endswith(", made\n")
    with load_fixed(bundle, cache_dir=own, threads=1) as model:
        assert np.array_equal(model.logits(IDS), expected)


def test_another_backbone_or_onnxruntime_has_another_folder(
    bundle: Path, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases: list[Any] = [(bundle, "fp32"), (bundle, "int8"), (tiny_bundle, "fp32")]
    found = {prepared_folder(tmp_path, open_bundle(path), kv) for path, kv in cases}
    monkeypatch.setattr(ort, "__version__", "1.28.0")
    assert len(found | {prepared_folder(tmp_path, open_bundle(bundle), "fp32")}) == 4


def test_the_command(bundle: Path, own: Path, capsys: Capture) -> None:
    assert prepare(bundle, own) == 0
    assert "there already" in capsys.readouterr().out
    assert main(["prepare", str(bundle), "--cache-dir", str(own), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["bundle"] == str(bundle.resolve())
    assert record["steps"] is None or [*record["steps"]["times"]] == ["1", "2", "4", "8"]
    assert main(["prepare", str(own), "--cache-dir", str(own)]) == 1
