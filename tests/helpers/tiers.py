"""Which cases of a test run in `make test`; the others run in `make test-all` only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(fast: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Mark all cases slow but those that are named."""
    kept = list(fast)
    slow = ((one, one if isinstance(one, tuple) else (one,)) for one in cases)
    return [
        one if one in kept else pytest.param(*each, marks=pytest.mark.slow) for one, each in slow
    ]
