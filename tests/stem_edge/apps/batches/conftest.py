"""The demo model, and files of rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from installed import DEMO

import stem_edge
from stem_edge.runtime.model import Model

Written = Callable[..., Path]


@pytest.fixture(scope="package")
def model(session_cache: object) -> Iterator[Model]:
    """The demo model, loaded with room for several answers."""
    with stem_edge.load(DEMO, sequences=8) as model:
        model.generate_texts(["a", "b"], max_new_tokens=4)  # which starts its threads
        yield model


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Writes rows, or lines as they are, into a file."""

    def write(*rows: Any) -> Path:
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        path = tmp_path / "in.jsonl"
        path.write_bytes(b"\n".join(lines) + b"\n")
        return path

    return write
