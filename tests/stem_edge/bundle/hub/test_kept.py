"""Models that are kept: found by short names, listed and removed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from contract import refused
from hub_server import Blob, HubServer, Model, cache_of
from installed import DEMO

import stem_edge
from stem_edge.bundle.hub.kept import MADE, named
from stem_edge.bundle.opening import open_bundle
from stem_edge.commands.main import main
from stem_edge.errors import BundleError, CheckpointError, InputError, StemEdgeError
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.first_load import made
from stem_edge.runtime.loading import open_or_make

Capture = pytest.CaptureFixture[str]
NAME = "acme/model"


@pytest.fixture
def cache(tmp_path: Path, own_cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the user, in which exports put the demo's bundle."""
    monkeypatch.setattr(made, "make", lambda checkpoint, bundle, *_: shutil.copytree(DEMO, bundle))
    monkeypatch.chdir(tmp_path)  # where no folder has the name of a model
    return own_cache_folder / "stem-edge"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (path := tmp_path / "Small.Q4_0.gguf").write_bytes(b"GGUF")
    return path


def listed(capsys: Capture) -> list[str]:
    capsys.readouterr()
    assert main(["list", "--json"]) == 0
    return [model["name"] for model in json.loads(capsys.readouterr().out)]


def test_a_made_bundle_has_the_name_of_its_checkpoint(
    hub: HubServer, cache: Path, file: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_or_make(file, LoadOptions())
    assert listed(capsys) == ["Small.Q4_0"]
    file.unlink()  # the bundle does without
    with stem_edge.load("Small.Q4_0") as model:
        assert model.generate_text("The", max_new_tokens=1)
    assert open_bundle("Small.Q4_0").path.parent.parent == cache / MADE
    assert main(["rm", "Small.Q4_0"]) == 0
    monkeypatch.setattr(Path, "rglob", lambda root, _: [root / "removed by another command"])
    assert listed(capsys) == [] and not list((cache / MADE).glob("*/"))


def test_a_bundle_on_a_hub_has_its_name_there(hub: HubServer, cache: Path, capsys: Capture) -> None:
    commit = hub.add(NAME, DEMO)
    open_or_make(f"hf:{NAME}", LoadOptions())
    assert listed(capsys) == ["model"]
    hub.requests.clear()
    assert open_bundle("model").path == cache_of(NAME) / "snapshots" / commit
    assert hub.requests == []  # because it is known by its commit
    wrong = cache_of(NAME) / "snapshots" / commit / "tokenizer.json"
    blob = wrong.resolve()
    blob.write_bytes(b" " * blob.stat().st_size)
    refused(lambda: open_bundle("model"), BundleError, "tokenizer.json", "sha256")
    assert listed(capsys) == ["model"]
    assert main(["rm", "model"]) == 0
    assert listed(capsys) == [] and not list(cache_of(NAME).glob("snapshots/*"))


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("model", {"config.json": b"{}", "model.safetensors": b"0"}),
        ("model.Q8_0", {"model.Q8_0.gguf": b"GGUF", "model.Q4_0.gguf": b"GGUF"}),
    ],
)
def test_a_checkpoint_on_a_hub_becomes_a_bundle(
    name: str, files: dict[str, bytes], hub: HubServer, cache: Path
) -> None:
    hub.models[NAME] = Model()
    hub.models[NAME].commit({file: Blob(data) for file, data in files.items()})
    asked = f"hf:{NAME}" + (":model.Q8_0.gguf" if name != "model" else "")
    for _ in range(2):
        assert open_or_make(asked, LoadOptions()).path.name == name
    assert len(list((cache / MADE).glob("*/"))) == 1


CASES: list[tuple[str, Callable[[], object], type[StemEdgeError], str]] = [
    ("nearly a name", lambda: named("Smal.Q4_0"), InputError, "did you mean Small.Q4_0?"),
    ("how a name begins", lambda: named("Sm"), InputError, "did you mean Small.Q4_0?"),
    ("no name", lambda: open_bundle("other"), BundleError, "other"),
    ("two of a name", lambda: named("twice"), InputError, "2 kept models are called twice"),
    ("no such file", lambda: stem_edge.load("hf:acme/ggufs:b.gguf"), CheckpointError, "no file b.gguf, found a.gguf, q8/b.gguf"),
    ("which file", lambda: stem_edge.load("hf:acme/ggufs"), CheckpointError, "GGUF files, a.gguf, q8/b.gguf; give one of them, like hf:acme/ggufs:a.gguf"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "words"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_what_is_refused(
    call: Callable[[], object], error: type[StemEdgeError], words: str, hub: HubServer, cache: Path
) -> None:
    for key, name in (("0" * 12, "Small.Q4_0"), ("1" * 12, "twice"), ("2" * 12, "twice")):
        shutil.copytree(DEMO, cache / MADE / key / name)
    hub.models["acme/ggufs"] = Model()
    hub.models["acme/ggufs"].commit({"a.gguf": Blob(b"GGUF"), "q8/b.gguf": Blob(b"GGUF")})
    refused(call, error, words)


def test_a_file_or_folder_comes_before_a_name(
    hub: HubServer, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    shutil.copytree(DEMO, cache / MADE / ("0" * 12) / "here")
    shutil.copytree(DEMO, tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    assert open_bundle("here").path == Path("here")
    assert main(["rm", "nothing"]) == 1
    assert "no model is called 'nothing'" in capsys.readouterr().err
