"""Evaluations on a cluster: the figures of one machine, to the digit."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest
from conformance import TEXT
from installed import DEMO
from ray_nodes import Nodes

import stem_edge
from stem_edge.cluster.evaluation import ray_scores
from stem_edge.measuring.quality.scores import ScoredWindow
from stem_edge.measuring.quality.scoring import Advance, Done, Scoring

pytestmark = pytest.mark.slow


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text of several pieces of work."""
    monkeypatch.setattr("stem_edge.cluster.evaluation.GROUP_TOKENS", 64)
    path = tmp_path / "text.txt"
    path.write_text("\n".join([TEXT] * 9))
    return path


@pytest.mark.parametrize(
    "options", [{"window": 32}, {"lines": True, "against": DEMO, "kv": "int8"}]
)
def test_the_figures_are_those_of_one_machine(
    nodes: Nodes, text: Path, options: dict[str, Any]
) -> None:
    expected = stem_edge.evaluate(DEMO, text, **options)
    elsewhere = ray_scores(nodes.address)
    assert stem_edge.evaluate(DEMO, text, **options, elsewhere=elsewhere) == expected


def test_a_killed_node_changes_nothing(nodes: Nodes, text: Path) -> None:
    seen = list[int]()

    def killing(
        scoring: Scoring, parts: Iterable[ScoredWindow], advance: Advance
    ) -> Generator[Done]:
        for done in ray_scores(nodes.address)(scoring, parts, advance):
            if not seen:
                nodes.kill()
            seen.append(done.number)
            yield done

    expected = stem_edge.evaluate(DEMO, text, window=32)
    assert stem_edge.evaluate(DEMO, text, window=32, elsewhere=killing) == expected
    assert len(seen) == len({*seen}) > 6
