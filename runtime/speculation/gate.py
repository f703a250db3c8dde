"""The gate: chooses how many drafts a step verifies, from costs of steps and recent hits.

It depends only on the text and on recorded costs, not on a clock, so the same call always
drafts the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stem_edge.runtime.backends.costs import BEFORE

WORTH = 1.05  # drafting begins at this many tokens in the time of a plain step
MEMORY = 0.95  # of each earlier outcome when a new one comes
TRUST = 4.0  # outcomes that the expectation before any of them counts as


class DraftChoice(NamedTuple):
    """The number of drafts of a step, and the expected tokens in the time of a plain step."""

    drafts: int
    gain: float


PLAIN = DraftChoice(0, 1.0)


class Gate:
    """Chooses the number of drafts of a step.

    times: tokens of a step -> its time; a one-token step takes 1. most: largest number of drafts. attention:
    time of each token of a step for each earlier token beyond the first BEFORE.
    """

    def __init__(self, times: Mapping[int, float], most: int, attention: float = 0.0) -> None:
        self._attention = attention
        self._times = {
            size: max(1.0, times[size]) for size in sorted(times) if 1 < size <= most + 1
        }
        self.most = max(self._times, default=1) - 1

    @property
    def can_pay(self) -> bool:
        """True if drafting is faster when all drafts are right."""
        return self.choose([1.0] * self.most, self.most) != PLAIN

    def choose(
        self, chances: Sequence[float], room: int, each: float = 0.0, before: int = 0
    ) -> DraftChoice:
        """Return the best number of drafts, at most `room`.

        chances: probability of each draft if all earlier ones are right. each: time to draft a token.
        before: number of tokens that a step attends to.
        """
        deep = self._attention * max(0, before - BEFORE)
        best, expected, chance, counted = PLAIN, 1.0, 1.0, 0
        for size, time in self._times.items():
            drafts = size - 1
            if drafts > min(room, len(chances)):
                break
            for one in chances[counted:drafts]:
                chance *= one
                expected += chance
            counted = drafts
            gain = expected * (1 + deep) / (time + size * deep + drafts * each)
            if gain > max(WORTH, best.gain):
                best = DraftChoice(drafts, gain)
        return best


class Chances:
    """Fraction of right drafts in each class; recent drafts count most."""

    def __init__(self, expected: Sequence[float]) -> None:
        self._right = [TRUST * chance for chance in expected]
        self._all = [TRUST] * len(expected)

    def of(self, kind: int) -> float:
        """Return the probability that a draft is right. kind: its class, at most the last class."""
        kind = min(kind, len(self._all) - 1)
        return self._right[kind] / self._all[kind]

    def saw(self, kind: int, right: bool) -> None:
        """Record whether a draft of class `kind` was right."""
        kind = min(kind, len(self._all) - 1)
        self._right[kind] = MEMORY * self._right[kind] + right
        self._all[kind] = MEMORY * self._all[kind] + 1
