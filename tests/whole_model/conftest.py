"""A random STEM model with its reference, for the tests of edits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

import stem_edge
from stem_edge.runtime import Model

if TYPE_CHECKING:
    from edit_oracle import Tried


@pytest.fixture(scope="session")
def stem(tmp_path_factory: pytest.TempPathFactory) -> Tried:
    """A plain STEM model for both engines. Do not change it."""
    from edit_oracle import tried

    return tried(tmp_path_factory.mktemp("stem"), "stem")


@pytest.fixture
def tiny_model(stem: Tried) -> Iterator[Model]:
    """The loaded model, with the smallest row cache."""
    with stem_edge.load(stem.path, slots=4) as model:
        yield model
