"""Check how checkpoints are refused, and read what an export wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stem_edge.errors import CheckpointError


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
