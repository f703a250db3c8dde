"""A folder for exports that all processes of a session share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """With pytest-xdist, the folder of a process lies in that of the session."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent
    found = folder / "blackbox"
    found.mkdir(exist_ok=True)
    return found
