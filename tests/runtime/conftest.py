"""Models that tests of the runtime load."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from installed import DEMO
from loading import load_fixed

from stem_edge.runtime import Model


@pytest.fixture
def demo() -> Iterator[Model]:
    with load_fixed(DEMO) as loaded:
        yield loaded


@pytest.fixture
def model(demo: Model) -> Model:
    return demo
