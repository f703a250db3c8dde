"""A process that does as told, whose memory is measured."""

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
