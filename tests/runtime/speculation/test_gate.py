"""How many tokens are drafted, by what steps cost and what was right."""

from __future__ import annotations

import pytest

from stem_edge.runtime.speculation.gate import PLAIN, Chances, DraftChoice, Gate

ONNX = {2: 1.4, 4: 2.4, 8: 4.2}  # measured, as are the next: AVX2 with int4, and with int8
INT8 = {2: 1.6, 4: 2.1, 8: 3.4}
FREE = {2: 1.0, 4: 1.0, 8: 1.0}
NEVER = {2: 2.0, 4: 4.0, 8: 8.0}


@pytest.mark.parametrize(
    ("times", "chance", "room", "expected"),
    [
        (ONNX, 1.0, 100, 7),
        (ONNX, 0.9, 100, 3),
        (ONNX, 0.6, 100, 1),
        (ONNX, 0.45, 100, 0),
        (ONNX, 0.0, 100, 0),
        (ONNX, 1.0, 6, 3),
        (ONNX, 1.0, 2, 1),
        (ONNX, 1.0, 0, 0),
        (INT8, 0.7, 100, 3),
        (INT8, 0.6, 100, 0),
        (INT8, 0.98, 100, 7),
        (FREE, 0.2, 100, 7),
        (FREE, 0.01, 100, 0),
        (NEVER, 1.0, 100, 0),
        ({}, 1.0, 100, 0),
        ({2: 0.5}, 0.04, 100, 0),  # no step is counted cheaper than one token's
    ],
)
def test_drafts(times: dict[int, float], chance: float, room: int, expected: int) -> None:
    gate = Gate(times, 7)
    assert gate.choose([chance] * 7, room).drafts == expected
    assert gate.can_pay == (max((size / cost for size, cost in times.items()), default=1) > 1.05)


@pytest.mark.parametrize(("before", "expected"), [(64, 7), (1064, 3), (2064, 1), (9064, 0)])
def test_fewer_are_drafted_where_attention_takes_longer(before: int, expected: int) -> None:
    gate = Gate(ONNX, 7, attention=0.001)
    assert gate.choose([0.95] * 7, 100, before=before).drafts == expected


@pytest.mark.parametrize(("most", "expected"), [(0, 0), (1, 1), (2, 1), (3, 3), (6, 3), (100, 7)])
def test_the_most_drafts(most: int, expected: int) -> None:
    gate = Gate(ONNX, most)
    assert gate.most == expected == gate.choose([1.0] * gate.most, 100).drafts
    assert gate.can_pay == (expected > 0)


def test_a_chance_counts_only_if_those_before_it_come_true() -> None:
    gate = Gate(ONNX, 7)
    assert gate.choose([0.9, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0], 7) == DraftChoice(1, 1.9 / 1.4)
    assert gate.choose([0.6, *[1.0] * 6], 7).drafts == 7
    assert gate.choose([0.6, *[1.0] * 6], 7).gain == pytest.approx((1 + 7 * 0.6) / 4.2)
    assert gate.choose([0.9, 0.9], 7).drafts == 1  # only so many are known
    assert gate.choose([], 7) == PLAIN


def test_drafting_takes_time_too() -> None:
    gate = Gate(ONNX, 7)
    assert gate.choose([0.9] * 7, 7, each=0.1).drafts == 3
    assert gate.choose([0.9] * 7, 7, each=0.1).gain == pytest.approx(3.439 / 2.7)
    assert gate.choose([0.9] * 7, 7, each=0.5) == PLAIN


def test_chances_follow_what_was_right_lately() -> None:
    chances = Chances((0.25, 0.9))
    assert (chances.of(0), chances.of(1), chances.of(99)) == (0.25, 0.9, 0.9)
    for _ in range(100):
        chances.saw(0, True)
        chances.saw(7, False)
    assert chances.of(0) > 0.98 and chances.of(1) < 0.02
    for _ in range(30):
        chances.saw(0, False)
    assert chances.of(0) < 0.25
