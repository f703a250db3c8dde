"""Record exports operation by operation, and finish them after a crash."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from crash_states import CrashState, Medium, Op, Recorder, crash_states
from tiny_exports import OPTIONS, TinyExport, bundle_files, many_writes, run_export

EACH = 25  # states per operation
WORK, ASIDE = ".stem-edge-out", ".stem-edge-out-old"


@dataclass(frozen=True)
class Recorded:
    """An export and the log of its operations."""

    export: TinyExport
    before: Medium
    log: list[Op]

    def states(self, each: int = EACH, log: Sequence[Op] | None = None) -> Iterator[CrashState]:
        """Yield crash states, the same in each call."""
        ops = self.log if log is None else log
        return crash_states(self.before, ops, each, random.Random(8))


def record_export(export: TinyExport, folder: Path, out: str = "out") -> Recorded:
    """Run an export in a new folder and record it."""
    folder.mkdir()
    start = export.prepare(folder)
    with pytest.MonkeyPatch.context() as patch:
        many_writes(patch)
        recorder = Recorder(folder)
        recorder.install(patch)
        export.run(start.parent / out)
    assert bundle_files(start.parent / out) == bundle_files(export.new)
    return Recorded(export, recorder.before, recorder.log)


def finish(export: TinyExport, out: Path) -> None:
    """Finish an export after a crash, and check that the bundle is complete and nothing is left over."""
    export.finish(out)
    assert bundle_files(out) == bundle_files(export.new)
    if any(
        path.name != "out" for path in out.parent.iterdir()
    ):  # because a deletion was interrupted
        run_export(export.checkpoint, out, OPTIONS["force"])
    assert [path.name for path in out.parent.iterdir()] == ["out"]
