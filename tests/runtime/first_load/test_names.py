"""Names of files and repositories never lead out of the folder where bundles of checkpoints are kept."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from contract import refused
from hub_server import HubServer, cache_of
from installed import DEMO

import stem_edge
from stem_edge.bundle.hub.kept import MADE, kept_bundles, named
from stem_edge.commands.main import main
from stem_edge.errors import InputError
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.first_load import made
from stem_edge.runtime.loading import open_or_make

Capture = pytest.CaptureFixture[str]
# A file's name, and the name that its bundle gets.
NAMES = {
    "...gguf": MADE,
    "..gguf": MADE,
    "....gguf": MADE,
    " .gguf": MADE,
    "a\nb.gguf": "a_b",
    "a\x1b[2Jb.gguf": "a_[2Jb",
    "..\\a.gguf": ".._a",
    "C:a.gguf": "C_a",
    "Made.json.gguf": MADE,
}


@pytest.fixture
def cache(own_cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the user, in which exports put the demo's bundle."""
    monkeypatch.setattr(made, "make", lambda checkpoint, bundle, *_: shutil.copytree(DEMO, bundle))
    return own_cache_folder / "stem-edge"


def gguf(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    (path := folder / name).write_bytes(b"GGUF")
    return path


@contextmanager
def a_bundle_and_notes(cache: Path, folder: Path) -> Iterator[None]:
    """Make a bundle that is in use, and a file of somebody else; both must still be there afterwards."""
    with stem_edge.load(gguf(folder, "first.gguf")) as model:
        (notes := cache / MADE / "notes.txt").write_text("mine")
        said = model.generate_text("The", max_new_tokens=2)
        yield
        assert notes.read_text() == "mine"
        assert model.generate_text("The", max_new_tokens=2) == said
    with stem_edge.load("first") as again:
        assert again.generate_text("The", max_new_tokens=2) == said


def listed(capsys: Capture) -> list[str]:
    capsys.readouterr()
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.isprintable() for line in lines) and len(lines) - 1 == len(list(kept_bundles()))
    return [line.split("  ")[0].rstrip() for line in lines[:-1]]


def test_files(tmp_path: Path, cache: Path, capsys: Capture) -> None:
    with a_bundle_and_notes(cache, tmp_path):
        for number, name in enumerate(NAMES):
            bundle = open_or_make(gguf(tmp_path / str(number), name), LoadOptions())
            assert bundle.path.parent.parent == cache / MADE
        assert sorted(listed(capsys)) == sorted(["first", *NAMES.values()])


def test_a_folder(tmp_path: Path, cache: Path, capsys: Capture) -> None:
    (folder := tmp_path / "...").mkdir()
    (folder / "config.json").write_text("{}")
    with a_bundle_and_notes(cache, tmp_path):
        with stem_edge.load(folder) as model:
            assert model.generate_text("The", max_new_tokens=1)
        assert "once, in " in (said := capsys.readouterr().err) and ", which takes minutes" in said
        assert sorted(listed(capsys)) == ["first", MADE]


def test_files_of_a_repository(
    tmp_path: Path, cache: Path, hub: HubServer, capsys: Capture
) -> None:
    names = ["..gguf", "a\x1bb.gguf"]
    for name in names:
        gguf(tmp_path / "files", name)
    hub.add("evil/model", tmp_path / "files")
    (cache_of("other/model") / "mine").mkdir(parents=True)
    with a_bundle_and_notes(cache, tmp_path):
        for name in names:
            bundle = open_or_make(f"hf:evil/model:{name}", LoadOptions())
            assert bundle.path.parent.parent == cache / MADE
        assert main(["generate", "hf:evil/model", "The"]) == 1  # its files are named
        assert all(line.isprintable() for line in capsys.readouterr().err.split("\n"))
        assert sorted(listed(capsys)) == sorted(["first", MADE, "a_b"])
    assert (cache_of("other/model") / "mine").is_dir()


def test_one_of_two_of_a_name_is_removed_by_its_place(
    tmp_path: Path, cache: Path, capsys: Capture
) -> None:
    for folder in ("a", "b"):
        stem_edge.load(gguf(tmp_path / folder, "m.gguf")).close()
    gc.collect()
    advice = refused(lambda: named("m"), InputError, "give one as")
    assert main(["rm", "m"]) == 1
    assert main(["rm", advice.rpartition(", ")[2]]) == 0
    assert listed(capsys) == ["m"]
    for name in ("", ".", "..", "/", str(cache / MADE), str(tmp_path)):
        assert main(["rm", name]) == 1
    assert listed(capsys) == ["m"]
