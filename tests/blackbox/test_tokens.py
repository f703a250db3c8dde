"""Fourteen models in every way of running them, on each engine: the tokens of an independent reference.

Each model has each way on one of its engines, each engine in turn, so that all pairs of the three are there.
Two models whose texts go far beyond what layers with a window keep have each way on each engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
from installed import HAS_GGML
from models import GGML, KINDS, ORT
from oracle import Oracle
from ways import WAYS, Case, ways_of

EVERYWHERE = ("windows", "gemma4")


def cells() -> list[Any]:
    """Models, ways and engines; without `slow`, each way once on the first model of EVERYWHERE, and once else."""
    found = list[Any]()
    for row, (name, kind) in enumerate(KINDS.items()):
        engines = [one for one in kind.engines if HAS_GGML or one != GGML]
        for column, way in enumerate(WAYS):
            able = [one for one in engines if way in ways_of(name, one)]
            some = able if name in EVERYWHERE else able[(row + column) % max(1, len(able)) :][:1]
            for engine in some:
                fast = (name, engine) == (EVERYWHERE[0], ORT) or column % len(KINDS) == row
                marks = [] if fast else [pytest.mark.slow]
                found.append(pytest.param(name, way, engine, marks=marks))
    return found


@pytest.mark.parametrize(("name", "way", "engine"), cells())
def test_tokens(name: str, way: str, engine: str, shared: Path, tmp_path: Path) -> None:
    reference = oracle.reference_of(name, shared, engine)
    WAYS[way](Case(name, engine, shared, tmp_path, Oracle(reference, KINDS[name])))


@pytest.mark.parametrize("name", [name for name in KINDS if name != "demo"])
def test_the_reference_has_the_logits_of_torch(name: str, shared: Path) -> None:
    ids, expected = oracle.frozen(name)
    found = oracle.reference_of(name, shared).logits(ids)[-len(expected) :]
    assert abs(found - expected).max() < 1e-4
