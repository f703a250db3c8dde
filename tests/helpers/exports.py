"""Interrupt exports between their steps, and check how checkpoints are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stem_edge.errors import CheckpointError
from stem_edge.export.job.journal import Journal


class Steps:
    """Records the steps of exports while the patch lasts."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self._stop = ""
        real = Journal.run

        def run(journal: Journal, name: str, work: Any, progress: Any) -> None:
            def interrupted(*arguments: Any) -> Any:
                work(*arguments)
                raise KeyboardInterrupt

            if name == self._stop:
                real(journal, name, interrupted, progress)
            self.done.extend([name] * (name not in journal.steps))
            real(journal, name, work, progress)

        patch.setattr(Journal, "run", run)

    def interrupt(self, step: str, export: Callable[[], object]) -> None:
        """Interrupt an export after a step's files are written, but before the journal lists it."""
        self._stop = step
        with pytest.raises(KeyboardInterrupt):
            export()
        self._stop = ""
        self.done.clear()


def refused(read: Callable[[], object], *parts: str | Path) -> None:
    """Check that a checkpoint is refused in one line that has these parts."""
    with pytest.raises(CheckpointError) as caught:
        read()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message


def contents(folder: Path) -> dict[str, bytes]:
    """Read every file below a folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
