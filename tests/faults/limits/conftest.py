"""A file of ten bytes for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from open_files import DATA


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of ten bytes."""
    path = tmp_path / "file"
    path.write_bytes(DATA)
    return path
