"""A toy model, whose batches copy what joins them or not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from toy_batches import check_given_back, toy_model

from stem_edge.runtime.model import Model


@pytest.fixture(params=["copies", "plain"])
def toy(request: pytest.FixtureRequest, tiny_bundle: Path) -> Iterator[tuple[Model, Any]]:
    """A model and its backend. The file's TOY are options of load, like how many slots there are."""
    options = request.module.TOY
    with toy_model(tiny_bundle, copies=request.param == "copies", **options) as made:
        yield made
        check_given_back(*made)
