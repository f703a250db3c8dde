"""A folder for exports that all processes of a session share; products that round no activations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stem_edge.graph.ir import Graph


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """With pytest-xdist, the folder of a process lies in that of the session."""
    folder = tmp_path_factory.getbasetemp()
    if hasattr(request.config, "workerinput"):
        folder = folder.parent
    found = folder / "blackbox"
    found.mkdir(exist_ok=True)
    return found


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU multiply activations as they are, which it usually rounds to 8 bits in each block."""
    node = Graph.node

    def exact(graph: Graph, *args: Any, **attributes: Any) -> str:
        attributes.pop("accuracy_level", None)
        return node(graph, *args, **attributes)

    monkeypatch.setattr(Graph, "node", exact)
