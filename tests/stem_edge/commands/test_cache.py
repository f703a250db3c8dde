"""`stem-edge cache`: listing and cleaning the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime as ort
import pytest
from installed import DEMO

import stem_edge
from stem_edge.bundle.keeping import check_place, keep_verdict
from stem_edge.bundle.opening import open_bundle
from stem_edge.bundle.verdicts import Verdicts
from stem_edge.commands.bundles.cache import entries
from stem_edge.commands.main import main
from stem_edge.ggml.check import check_library
from stem_edge.graph.kv import KV_TYPES
from stem_edge.runtime.backends.onnxruntime.prepared.kept_graphs import builders
from stem_edge.runtime.backends.onnxruntime.prepared.prepacked import (
    FORMAT,
    RECORD,
    PreparedRecord,
    marks,
    prepared_folder,
)
from stem_edge.runtime.text.kept import readers
from stem_edge.system.user_folder import cpu_digest
from stem_edge.tables.token_counts import write_counts

Capture = pytest.CaptureFixture[str]


def key(label: str) -> str:
    """Return a name of an entry, as stem-edge gives them."""
    return hashlib.md5(label.encode()).hexdigest()


def put(root: Path, name: str, **changes: object) -> Path:
    """Put a prepacked backbone of an existing bundle into the folder."""
    shutil.copytree(DEMO, root / "bundle", dirs_exist_ok=True)
    folder = root / "prepared" / name
    folder.mkdir(parents=True)
    (folder / "g.onnx").write_bytes(bytes(1000))
    record = PreparedRecord(
        format=FORMAT,
        bundle=str(root / "bundle"),
        onnxruntime=ort.__version__,
        cpu=cpu_digest(),
        files={"g.onnx": marks(folder / "g.onnx")},
        prefill=None,
        seconds={},
    )
    record = msgspec.structs.replace(record, **changes)
    (folder / RECORD).write_bytes(msgspec.json.encode(record))
    return folder


def put_verdict(root: Path, name: str, into: str = "") -> None:
    """A good verdict on a library that exists, under its own name unless another is given."""
    library = root / "libraries" / name / "libggml.so"
    library.parent.mkdir(parents=True)
    library.touch()
    told = {"repack": True}
    before = set(root.glob("ggml/*"))
    check_library(library, root, [sys.executable, "-c", f"print({json.dumps(told)!r})"])
    (made,) = set(root.glob("ggml/*")) - before
    if into:
        made.rename(made.with_name(into))


def put_trial(root: Path, name: str) -> None:
    """A place and a good verdict of a bundle, under its name; "tried" under their own."""
    bundle = Path(shutil.copytree(DEMO, root / "bundles" / name))
    records = Verdicts(open_bundle(bundle), "onnxruntime", root)
    for path, keep in (
        (records.verdict_file, keep_verdict),
        (records.place_file, check_place),
    ):
        keep(records)
        if name != "tried":
            path.rename(path.with_name(f"{key(f'{name}-{path.parent.name}')}.json"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for kv in KV_TYPES:
        put(tmp_path, prepared_folder(tmp_path, open_bundle(DEMO), ort.__version__, kv).name)
    put(tmp_path, key("earlier"))
    put(tmp_path, key("old-ort"), onnxruntime="1.2.3")
    put(tmp_path, key("other-cpu"), cpu="x")
    put(tmp_path, key("orphan"), bundle=str(tmp_path / "gone"))
    put(tmp_path, key("cut"), files={"g.onnx": 1001})
    put(tmp_path, MAKING)
    put(tmp_path, LEFT)
    write_counts(tmp_path / "counts" / f"{key('counts')}.npy", np.ones(3, np.uint32))
    for kind, makers in (("tokenizers", readers()), ("graphs", builders())):
        (tmp_path / kind).mkdir()
        for name in (f"{makers}-{key(kind)}", f"{key('earlier')}-{key(kind)}"):
            (tmp_path / kind / name).touch()
    put_verdict(tmp_path, "as it was")
    put_verdict(tmp_path, "changed", into=f"{key('changed-ggml')}.json")
    put_verdict(tmp_path, "gone", into=f"{key('gone-ggml')}.json")
    shutil.rmtree(tmp_path / "libraries" / "gone")
    (tmp_path / "ggml" / f"{key('cut-ggml')}.json").write_text('{"format":')
    put_trial(tmp_path, "changed")
    put_trial(tmp_path, "lost")
    put_trial(tmp_path, "tried")
    shutil.rmtree(tmp_path / "bundles" / "lost")
    for kind in ("trials", "places"):
        (tmp_path / kind / f"{key(f'cut-{kind}')}.json").write_text('{"format":')
    return tmp_path


KINDS = ("prepared", "ggml", "trials", "places")
OTHER = "made for another bundle, onnxruntime, tokenizers, stem-edge or processor"
MAKING, LEFT = (f".making-{number}-{key('x')}-01234567" for number in (os.getpid(), 999999999))
STALE = {
    key("earlier"): "its bundle has changed",
    key("old-ort"): "made by onnxruntime 1.2.3",
    key("other-cpu"): "made for another processor",
    key("orphan"): "its bundle is gone or damaged",
    key("cut"): "damaged",
    MAKING: "",
    LEFT: "was not finished",
    f"{key('counts')}.npy": "",
    f"{readers()}-{key('tokenizers')}": "",
    f"{builders()}-{key('graphs')}": "",
    f"{key('earlier')}-{key('tokenizers')}": "made by another stem-edge or tokenizers",
    f"{key('earlier')}-{key('graphs')}": "made by another stem-edge or tokenizers",
    f"{key('changed-ggml')}.json": "made for another library, processor or stem-edge",
    f"{key('gone-ggml')}.json": "its library is gone",
    f"{key('cut-ggml')}.json": "damaged",
    f"{key('changed-trials')}.json": OTHER,
    f"{key('changed-places')}.json": OTHER,
    f"{key('lost-trials')}.json": "its bundle is gone or damaged",
    f"{key('lost-places')}.json": "its bundle is gone or damaged",
    f"{key('cut-trials')}.json": "damaged",
    f"{key('cut-places')}.json": "damaged",
}


def stale(root: Path) -> dict[str, str]:
    """STALE, with the names of the verdicts and the place that count."""
    names = {path.name for kind in KINDS for path in root.glob(f"{kind}/*")}
    names -= STALE.keys()
    assert len(names) == 3 + len(KV_TYPES)
    return STALE | dict.fromkeys(names, "")


def test_what_is_old_and_why(root: Path) -> None:
    assert {e.path.name: e.stale for e in entries(root)} == stale(root)


def test_what_a_verdict_is_about(root: Path) -> None:
    of = {e.path.name: e.of for e in entries(root) if e.kind == "ggml"}
    libraries = root / "libraries"
    assert of[f"{key('gone-ggml')}.json"] == str(libraries / "gone" / "libggml.so")
    assert of[f"{key('cut-ggml')}.json"] == ""
    assert str(libraries / "as it was" / "libggml.so") in of.values()


def test_listing(root: Path, capsys: Capture) -> None:
    assert main(["cache", "--cache-dir", str(root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{root}: ")
    assert lines[0].endswith(f"in {len(stale(root))} entries")
    assert lines[-1] == "to remove old entries: stem-edge cache --remove old"
    for name, why in stale(root).items():
        (line,) = (line for line in lines[1:-1] if f" {name} " in f"{line} ")
        assert line.endswith(f"old: {why}") == bool(why)


def test_removing_what_is_old(root: Path, capsys: Capture) -> None:
    before = stale(root)
    assert main(["cache", "--cache-dir", str(root), "--remove", "old", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    removed = {Path(e["path"]).name for e in report["entries"] if e["removed"]}
    assert removed == {name for name, why in before.items() if why}
    assert {e.path.name for e in entries(root)} == before.keys() - removed


def test_removing_all(root: Path, capsys: Capture) -> None:
    assert main(["cache", "--cache-dir", str(root), "--remove", "all"]) == 0
    assert list(entries(root)) == []
    assert (root / "bundle").is_dir()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], ""),
        (["--remove", "old"], "nothing removed\n"),
        (["--remove", "all"], "nothing removed\n"),
    ],
)
def test_an_empty_folder(tmp_path: Path, capsys: Capture, options: list[str], said: str) -> None:
    assert main(["cache", "--cache-dir", str(tmp_path / "none"), *options]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'none'}: 0 B in 0 entries\n{said}"


def test_prompts_are_listed(tmp_path: Path, capsys: Capture) -> None:
    with stem_edge.load(DEMO, prompt_cache=True, cache_dir=tmp_path) as model:
        list(model.generate("The capital of France is Paris. " * 30, max_new_tokens=1))
    (made,) = (tmp_path / "prefixes").iterdir()
    damaged, new = f"{'0' * 32}-{'0' * 32}.safetensors", f".{'0' * 16}.tmp"
    (tmp_path / "prefixes" / damaged).write_bytes(b"nothing")
    for name in (new, "model.safetensors", "notes.tmp"):
        (tmp_path / "prefixes" / name).touch()
    listed = {e.path.name: e for e in entries(tmp_path) if e.kind == "prefixes"}
    assert {name: entry.stale for name, entry in listed.items()} == {
        made.name: "",
        damaged: "damaged",
        new: "",
    }
    assert listed[made.name].of.endswith(" tokens")
    assert main(["cache", "--remove", "old", "--cache-dir", str(tmp_path)]) == 0
    assert "prefixes" in capsys.readouterr().out
    others = {"model.safetensors", "notes.tmp"}
    assert {path.name for path in (tmp_path / "prefixes").iterdir()} == {made.name, new} | others
    assert main(["cache", "--remove", "all", "--cache-dir", str(tmp_path)]) == 0
    assert {path.name for path in (tmp_path / "prefixes").iterdir()} == others


FOREIGN = (
    *("prepared/thesis/text", "trials/patients.csv", "places/map.geojson", "graphs/fig-1.pdf"),
    *("tokenizers/my-tokenizer.json", "counts/birds.npy", "tier/cake.rows", "ggml/notes.json"),
    *("checked/list.json", "made/website/manifest.json", "prefixes/model.safetensors"),
)


def test_what_has_other_names_stays(root: Path, tmp_path: Path) -> None:
    for name in FOREIGN:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("mine")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "mine").touch()
    links = root / "counts" / f"{key('dangling')}.npy", root / "prepared" / key("link")
    links[0].symlink_to(tmp_path / "gone")
    links[1].symlink_to(elsewhere)
    assert main(["cache", "--cache-dir", str(root)]) == 0
    for chosen in ("old", "all"):
        assert main(["cache", "--cache-dir", str(root), "--remove", chosen]) == 0
    assert all((root / name).read_text() == "mine" for name in FOREIGN)
    assert all(link.is_symlink() for link in links) and (elsewhere / "mine").is_file()


def test_an_empty_name_removes_nothing(root: Path, capsys: Capture) -> None:
    before = len(list(entries(root)))
    assert main(["cache", "--cache-dir", str(root), "--remove", ""]) == 1
    assert "empty name" in capsys.readouterr().err and len(list(entries(root))) == before
