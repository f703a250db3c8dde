"""A process that does as told, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from programs import Program


@pytest.fixture
def program() -> Iterator[Program]:
    running = Program()
    with running.process:
        yield running
        running.process.kill()
