"""Where a prompt may go on from an earlier one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from stem_edge.runtime.backends.context import PromptKey
from stem_edge.runtime.backends.interface import Resumes
from stem_edge.runtime.engine import starts_of
from stem_edge.runtime.prefixes.reuse import reusable
from stem_edge.tables.rows import RowLookup

IDS = tuple(range(100, 140))
EDITED: RowLookup = ((7,),)
SIZE = 8


def prompt(
    ids: Sequence[int], lookups: Mapping[int, RowLookup] | None = None, size: int = SIZE
) -> PromptKey:
    return PromptKey(ids, lookups or {}, starts_of(len(ids), size))


KEPT = prompt(IDS[:33])  # its steps begin at 0, 8, 16, 24 and 31 - 1, so that none has one token


@pytest.mark.parametrize(
    ("later", "by_pairs", "by_steps"),
    [
        pytest.param(prompt(IDS), 32, 24, id="longer"),
        pytest.param(prompt(IDS[:33]), 30, 30, id="the same"),
        pytest.param(prompt(IDS[:34]), 32, 24, id="one more"),
        pytest.param(prompt(IDS[:26]), 24, 24, id="shorter"),
        pytest.param(prompt(IDS[:25]), 22, 16, id="shorter by a step: its last one begins at 22"),
        pytest.param(prompt((*IDS[:21], 1, 2, 3)), 20, 16, id="another id in the midst of a pair"),
        pytest.param(prompt((*IDS[:20], 1, 2, 3)), 20, 16, id="another id where a pair begins"),
        pytest.param(prompt((*IDS[:1], 1, *IDS[2:])), 0, 0, id="another second id"),
        pytest.param(prompt((1, *IDS[1:])), 0, 0, id="another first id"),
        pytest.param(prompt(IDS[:7]), 0, 0, id="so short that the other graph computes it"),
        pytest.param(prompt(IDS[:8]), 6, 0, id="just long enough for the same graph"),
        pytest.param(prompt(IDS, {19: EDITED}), 18, 16, id="another row"),
        pytest.param(prompt(IDS, {39: EDITED}), 32, 24, id="another row behind"),
        pytest.param(prompt(IDS, size=12), 32, 0, id="other steps"),
        pytest.param(prompt(IDS, size=3), 0, 0, id="steps that part pairs"),
    ],
)
def test_reusable(later: PromptKey, by_pairs: int, by_steps: int) -> None:
    computed = len(KEPT.token_ids)
    assert reusable(KEPT, computed, later, "pairs") == by_pairs
    assert reusable(KEPT, computed, later, "steps") == by_steps
    assert reusable(KEPT, computed, later, "") == 0


@pytest.mark.parametrize("resumes", ["pairs", "steps"])
def test_only_what_was_computed_and_is_settled_is_reused(resumes: Resumes) -> None:
    found = [reusable(KEPT, computed, KEPT, resumes) for computed in range(34)]
    assert all(count <= computed for computed, count in enumerate(found))
    assert sorted(found) == found and found[-1] == 30
    later = prompt(IDS[:26])
    assert [reusable(KEPT, 33, later, resumes, settled) for settled in (0, 24, 25)] == [24, 24, 0]


def test_lookups_must_be_the_same() -> None:
    edited = prompt(IDS, {19: EDITED, 5: EDITED})
    assert reusable(edited, 40, edited, "pairs") == 38
    assert reusable(edited, 40, prompt(IDS), "pairs") == 4
    assert reusable(edited, 40, prompt(IDS, {5: EDITED}), "pairs") == 18
    assert reusable(edited, 40, prompt(IDS, {5: EDITED, 19: ((8,),)}), "pairs") == 18
