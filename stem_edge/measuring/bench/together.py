"""Sequences that decode together, timed token by token; one ends, and another takes its place.

All follow texts. Of `count` sequences, the last to begin is the first to end: from its first token to
its last, all decode. Then one more joins, and its first token ends the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from stem_edge.errors import InputError

if TYPE_CHECKING:
    from stem_edge.runtime.rows.records import RowCounters

CHUNK = 32  # tokens of a prompt, or more, for each token that sequences decode meanwhile


class FollowedText(NamedTuple):
    """A prompt and the answer that is followed."""

    prompt: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Guessed:
    """A decoded answer."""

    seconds: float  # after the first token
    drafted: int
    accepted: int
    own: list[int]  # most probable token at each place of the answer, whatever the text has there
    costs: dict[int, float] = field(default_factory=dict)  # tokens of a step -> time, over one's

    def figures(self) -> dict[str, float]:
        """Return all but the tokens."""
        costs = {f"step_of_{tokens}": cost for tokens, cost in self.costs.items()}
        found = {"seconds": self.seconds, "drafted": self.drafted, "accepted": self.accepted}
        return found | costs


class Arrival(NamedTuple):
    """A token of a sequence, and when it was chosen."""

    seconds: float
    sequence: int
    token: int


@dataclass
class Together:
    """A run of `count` sequences."""

    count: int
    counters: Callable[[], RowCounters] | None = None  # of an engine that has them
    costs: dict[int, float] = field(default_factory=dict)  # tokens of a step -> time, over one's
    began: float = field(default_factory=time.perf_counter)
    arrivals: list[Arrival] = field(default_factory=list)
    _counted: list[RowCounters] = field(default_factory=list)  # at each token of the last

    def chosen(self, sequence: int, token: int) -> None:
        """Note a token, now."""
        self.arrivals.append(Arrival(time.perf_counter(), sequence, token))
        if self.counters is not None and sequence == self.count - 1:
            self._counted.append(self.counters())

    @property
    def joined(self) -> bool:
        """Whether the one more has its first token, so that nothing is left to see."""
        return self.count in (arrival.sequence for arrival in self.arrivals[-1:])

    def figures(self) -> dict[str, float]:
        """Return rates, times in seconds, and rows. Raises InputError if not all decoded together."""
        times = self._times()
        begin, end = times[self.count - 1][0], times[self.count - 1][-1]
        if min(times[sequence][-1] for sequence in range(self.count)) < end:
            raise InputError(
                f"{self.count} sequences did not decode together: some ended before others began; "
                "give more --memory, fewer sequences, or a longer --context-length"
            )
        steps = self._steps(begin, end)
        tokens = sum(map(len, steps))
        found = {
            "tokens_per_second": tokens / (end - begin),
            "distinct_rows_per_step": sum(len(set(step)) for step in steps) / len(steps),
            "distinct_rows_per_token": sum(len(set(step)) for step in steps) / tokens,
            **self._read(tokens),
        }
        if self.count in self.costs:
            found["allowed_gain"] = self.count / self.costs[self.count]
        if self.count == 1:
            return found | {"first_token_seconds": begin - self.began}
        joined = times[self.count][0]
        waits = [
            later - earlier
            for sequence in range(self.count - 1)
            for earlier, later in pairwise(times[sequence])
            if later > end
        ]
        return found | {"first_token_seconds": joined - end, "longest_wait_seconds": max(waits)}

    def _read(self, tokens: int) -> dict[str, float]:
        """Return what was read for each token while all decoded."""
        if not self._counted:
            return {}
        begin, end = self._counted[0], self._counted[-1]
        return {
            "rows_read_per_token": (end.misses - begin.misses) / tokens,
            "flash_bytes_per_token": (end.bytes_read - begin.bytes_read) / tokens,
        }

    def _times(self) -> dict[int, list[float]]:
        times: dict[int, list[float]] = {}
        for seconds, sequence, _ in self.arrivals:
            times.setdefault(sequence, []).append(seconds)
        return times

    def _steps(self, begin: float, end: float) -> list[list[int]]:
        """Return the tokens chosen from `begin` to `end` by step; the last sequence ends a step."""
        steps: list[list[int]] = [[]]
        for seconds, sequence, token in self.arrivals:
            if begin < seconds <= end:
                steps[-1].append(token)
                if sequence == self.count - 1:
                    steps.append([])
        return steps[:-1]


def lengths(count: int, prompt_tokens: int, new_tokens: int) -> list[int]:
    """Return the tokens of the answers of `count` sequences, and of the one that joins them.

    The others must outlive the last: by what they decode while prompts are computed.
    """
    meanwhile = (2 + prompt_tokens // CHUNK) * count
    return [*[new_tokens + meanwhile] * (count - 1), new_tokens, *[1] * (count > 1)]


def texts_of(
    ids: list[int], count: int, prompt_tokens: int, new_tokens: int, begin: int = 0
) -> list[FollowedText]:
    """Cut texts for `count` sequences and one that joins, one after the other from a place on.

    The ids repeat if they are too few.
    """
    texts, at = list[FollowedText](), begin
    for new in lengths(count, prompt_tokens, new_tokens):
        text = [ids[place % len(ids)] for place in range(at, at + prompt_tokens + new)]
        texts.append(FollowedText(text[:prompt_tokens], text[prompt_tokens:]))
        at += len(text)
    return texts
