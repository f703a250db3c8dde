"""Exports that are interrupted and go on, and checkpoints that are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stem_edge import CheckpointError
from stem_edge.export.job.journal import Journal


class Steps:
    """The steps that exports do, as long as the patch lasts."""

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
        """Cut an export off where a step's files are there, and its line in the journal is not."""
        self._stop = step
        with pytest.raises(KeyboardInterrupt):
            export()
        self._stop = ""
        self.done.clear()


def refused(read: Callable[[], object], *parts: str | Path) -> None:
    """Reading a checkpoint fails in one line that has these parts."""
    with pytest.raises(CheckpointError) as caught:
        read()
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert str(part) in message


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
