"""Servers of the demo model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("starlette")
from installed import DEMO
from servers import client_of, compute_of, wait_for
from starlette.testclient import TestClient

import stem_edge
from stem_edge.runtime.model import Model
from stem_edge.serving import app


@pytest.fixture(scope="package")
def model(tried: object) -> Iterator[Model]:
    """The demo model, loaded."""
    with stem_edge.load(DEMO) as model:
        model.generate_text("a", max_new_tokens=2)  # which starts its threads
        yield model


@pytest.fixture(scope="package")
def client(model: Model) -> Iterator[TestClient]:
    """A client of a server of the demo model."""
    program = app(model, name="demo")
    with client_of(program) as client:
        wait_for(lambda: compute_of(program).loaded is not None)
        yield client
