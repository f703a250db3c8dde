"""Graphs that were built before: the same, and built again where anything differs."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from installed import ROOT

from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.runtime.backends.onnxruntime.prepared import kept_graphs as module
from stem_edge.runtime.backends.onnxruntime.prepared.kept_graphs import GRAPHS, kept_graphs
from stem_edge.runtime.backends.onnxruntime.providers.graphs import joined_graphs


@pytest.fixture
def bundle() -> Bundle:
    return open_bundle(ROOT / "stem_edge" / "demo_model")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether graphs were built with the graph for prompts, for each time."""
    calls = list[bool]()

    def build(bundle: Bundle, **options: Any) -> object:
        calls.append(options["prefill"])
        return joined_graphs(bundle, **options)

    monkeypatch.setattr(module, "joined_graphs", build)
    return calls


def test_they_are_built_once_for_each_choice(
    bundle: Bundle, built: list[bool], tmp_path: Path
) -> None:
    for prefill in (False, True, False, True):
        expected = joined_graphs(bundle, prefill=prefill)
        found = kept_graphs(tmp_path, bundle, prefill=prefill)
        assert found == expected
        assert [*found] == [*expected]
    assert built == [False, True]


def cut(folder: Path) -> None:
    (file,) = (folder / GRAPHS).iterdir()
    file.write_bytes(file.read_bytes()[:-1])


def flip(folder: Path) -> None:
    (file,) = (folder / GRAPHS).iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def change_code(file: str) -> Callable[[Path], None]:
    return lambda folder: os.utime(folder / "stem_edge" / file, ns=(1, 1))


CODE = ["graph/special/altup.py", "numerics/quantize.py", "bundle/manifest.py"]


@pytest.mark.parametrize(
    "change", [cut, flip, *(pytest.param(change_code(file), id=file) for file in CODE)]
)
def test_they_are_built_again(
    change: Callable[[Path], None],
    bundle: Bundle,
    built: list[bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for code in (tmp_path / "stem_edge" / file for file in CODE):
        code.parent.mkdir(parents=True)
        code.touch()
    monkeypatch.setattr(module, "package", str(tmp_path / "stem_edge" / "__init__.py"))
    expected = kept_graphs(tmp_path, bundle, prefill=False)
    change(tmp_path)
    assert kept_graphs(tmp_path, bundle, prefill=False) == expected
    assert built == [False, False]


def test_a_folder_that_cannot_be_written_keeps_none(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / GRAPHS).touch()
    assert kept_graphs(tmp_path, bundle, prefill=False) == joined_graphs(bundle, prefill=False)


def test_they_name_the_folder_as_the_bundle_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT / "stem_edge")
    for name in (Path("demo_model"), ROOT / "stem_edge" / "demo_model"):
        bundle = open_bundle(name)
        assert kept_graphs(tmp_path, bundle, prefill=False) == joined_graphs(bundle, prefill=False)
