"""A table store to damage, for the tests of tables and of their limits."""

from __future__ import annotations

from pathlib import Path

import pytest
from damaged_stores import LAYOUT, RECORDS
from stores import write_store


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Folder of the store that helpers/damaged_stores.py describes."""
    write_store(tmp_path / "tables.zarr", LAYOUT, RECORDS, records_per_shard=2)
    return tmp_path / "tables.zarr"
