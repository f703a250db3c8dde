"""One Ray cluster for all tests, because a node takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_nodes import Nodes


@pytest.fixture(scope="session")
def started(tried: Path) -> Iterator[Nodes]:
    """A cluster whose caches lie in `tried`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        nodes = Nodes()
        yield nodes
        nodes.end()


@pytest.fixture
def nodes(started: Nodes) -> Nodes:
    """Three nodes."""
    started.set(3)
    return started
