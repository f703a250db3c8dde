"""Exports without real syncs, for the tests of this folder."""

from __future__ import annotations

import pytest

from stem_edge.files import disk


@pytest.fixture(autouse=True)
def nothing_is_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip real syncs, because they are slow and only the recorded ones matter."""
    monkeypatch.setattr(disk, "_sync", lambda descriptor: None)
