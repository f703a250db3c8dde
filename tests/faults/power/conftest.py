"""Exports without real syncs, for the tests of this folder."""

from __future__ import annotations

import pytest

from stem_edge.files import disk


@pytest.fixture(autouse=True)
def nothing_is_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the record counts here, and a real sync takes its time."""
    monkeypatch.setattr(disk, "_sync", lambda descriptor: None)
