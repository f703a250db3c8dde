"""Leftovers of interrupted exports are deleted, and never taken for a bundle."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from contract import refused
from crash_states import below, write_tree
from faulty_disk import Failing, watch
from recorded_exports import ASIDE, WORK, finish, record_export
from tiny_exports import Exports, bundle_files, run_export

from stem_edge.bundle.opening import open_bundle
from stem_edge.errors import BundleError, ExportError


def test_x5_an_old_bundle_that_cannot_be_deleted_goes_with_the_next_export(
    exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export, out = exports["force"], exports["force"].prepare(tmp_path)
    with monkeypatch.context() as patch:
        watch(patch, ["remove_folder"], Failing(0, 5, for_ever=True))
        export.run(out)
    assert bundle_files(out) == bundle_files(export.new)
    finish(export, out)


def test_x7_leftovers_are_deleted(
    exports: Exports, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """Leftovers: a lock, and a working folder with files of an export that was cut off."""
    export, out = exports["new"], tmp_path / "out"
    (tmp_path / f"{WORK}.lock").write_text("")
    recorded = record_export(export, tmp_path_factory.mktemp("recorded") / "new")
    states = [s for s in recorded.states() if below(s.tree, WORK) is not None]
    unfinished = next(s for s in states if f"{WORK}/backbone.onnx.data" in s.tree)
    write_tree(unfinished.tree, tmp_path)
    export.run(out)
    assert bundle_files(out) == bundle_files(export.new)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_x7_a_bundle_moved_aside_is_restored(exports: Exports, tmp_path: Path) -> None:
    """A kill between two renames leaves no bundle of that name, but two others."""
    export = exports["force"]
    assert export.old is not None
    shutil.copytree(export.old, tmp_path / ASIDE)
    shutil.copytree(export.new, tmp_path / WORK)
    message = refused(
        lambda: run_export(export.checkpoint, tmp_path / "out", {}), ExportError, "--force"
    )
    assert "already exists" in message
    assert bundle_files(tmp_path / "out") == bundle_files(export.old)
    finish(export, tmp_path / "out")


def test_x7_working_folders_and_locks_are_not_bundles(tmp_path: Path) -> None:
    """Leftovers do not open, whatever they contain."""
    (tmp_path / WORK).mkdir()
    (tmp_path / WORK / "tokenizer.json").write_bytes(b"{}")
    refused(lambda: open_bundle(tmp_path / WORK), BundleError, tmp_path / WORK)
    refused(lambda: open_bundle(tmp_path / "out"), BundleError, tmp_path / "out")
