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
from stem_edge.measuring.quality.scores import Part
from stem_edge.measuring.quality.scoring import Advance, Done, Scoring

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("options", [{}, {"lines": True}, {"against": DEMO, "kv": "int8"}])
def test_the_figures_are_those_of_one_machine(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr("stem_edge.cluster.evaluation.GROUP_TOKENS", 64)  # several groups
    text, groups = tmp_path / "text.txt", list[Done]()
    text.write_text("\n".join([TEXT] * 3))

    def killing(scoring: Scoring, parts: Iterable[Part], advance: Advance) -> Generator[Done]:
        for done in stem_edge.ray_scores(nodes.address)(scoring, parts, advance):
            if not groups:
                nodes.kill()
            groups.append(done)
            yield done

    options |= {"window": 32, "progress": False}
    expected = stem_edge.evaluate(DEMO, text, **options)
    assert stem_edge.evaluate(DEMO, text, **options, elsewhere=killing) == expected
    assert len(groups) > 3
