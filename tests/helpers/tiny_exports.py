"""Exports that take a twentieth of a second, for tests that interrupt them everywhere."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import pytest
from exports import contents
from faulty_disk import shorten
from make_checkpoint import Shape, write_checkpoint

import stem_edge

Kind = Literal["new", "force"]
KINDS: tuple[Kind, ...] = ("new", "force")
SHAPE = Shape(vocab_size=258, n_layers=2, d_ff=32, stem_layers=(1,))
OLD: dict[str, Any] = {"type": "int8", "prefill_graph": False, "rows": "fp16"}
OPTIONS: dict[Kind, dict[str, Any]] = {
    "new": {"rows": "int8"},
    "force": {"rows": "int8", "force": True},
}
PIECE_NBYTES = 2048  # size of a write, small so that there are many


def bundle_files(folder: Path) -> dict[str, bytes] | None:
    """Read every file below a folder; None if there is no such folder."""
    return contents(folder) if folder.is_dir() else None


@dataclass(frozen=True)
class TinyExport:
    """An export, with the bundle that exists before it (if any) and the bundle after it."""

    kind: Kind
    checkpoint: Path
    old: Path | None
    new: Path

    def prepare(self, folder: Path) -> Path:
        """Copy the old bundle, if any, below `folder`. Returns where to export to."""
        if self.old is not None:
            shutil.copytree(self.old, folder / "out")
        return folder / "out"

    def run(self, out: Path) -> None:
        """Run the export."""
        run_export(self.checkpoint, out, OPTIONS[self.kind])

    def finish(self, out: Path) -> None:
        """Run the export again, as a user would, unless it was complete."""
        if bundle_files(out) != bundle_files(self.new):
            self.run(out)


def run_export(checkpoint: Path, out: Path, options: dict[str, Any]) -> None:
    """Export with one thread."""
    default: dict[str, Any] = {"type": "fp32", "threads": 1, "progress": False}
    stem_edge.export_bundle(checkpoint, out, **(default | options))


Exports: TypeAlias = dict[Kind, TinyExport]


def tiny_exports(folder: Path) -> Exports:
    """Make exports of all kinds. Do not change the folder."""
    checkpoint = write_checkpoint(folder / "checkpoint", SHAPE, layout="consolidated")
    run_export(checkpoint, folder / "old", OLD)
    run_export(checkpoint, folder / "new", OPTIONS["new"])
    ends: dict[Kind, tuple[Path | None, Path]] = {
        "new": (None, folder / "new"),
        "force": (folder / "old", folder / "new"),
    }
    return {kind: TinyExport(kind, checkpoint, old, new) for kind, (old, new) in ends.items()}


def many_writes(patch: pytest.MonkeyPatch) -> None:
    """Write in small pieces, and make temporary names predictable."""
    numbers = iter(range(1 << 30))
    patch.setattr("stem_edge.files.disk.os.urandom", lambda size: next(numbers).to_bytes(size))
    shorten(patch, PIECE_NBYTES)
