"""KV cache of layers with a sliding window: makes room for new tokens by dropping the oldest."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from stem_edge.graph import names as io


class KvWindow:
    """Sliding window of one sequence in KV cache arrays [1, heads, rows, width]. window: in tokens."""

    def __init__(self, arrays: Sequence[npt.NDArray[Any]], window: int) -> None:
        self._heads, self._window = [head for array in arrays for head in array[0]], window
        self.capacity = min(map(len, self._heads))
        self.dropped = 0  # number of dropped tokens: the position of the token in the first row
        # Position of the last step that dropped tokens. From there on, a context that took the same
        # steps has dropped the same tokens, and sums in the same order.
        self.settled = 0

    @property
    def earliest(self) -> int:
        """Earliest position, other than 0, where a step finds all tokens of its window in the arrays."""
        return self.dropped + self._window - 1 if self.dropped else 0

    def together(self, position: int) -> int:
        """Return how many tokens from `position` on fit without dropping old tokens.

        If no token fits, return how many fit after the next drop.
        """
        if (room := self.capacity - position + self.dropped) < 1:
            room = self.capacity - position + self._first(position)
        return room

    def make_room(self, position: int, count: int) -> int:
        """Make room for `count` tokens from a position on; return the position of the token in the first row.

        No row that a step at this position reads is dropped, so a step that failed can be repeated. After an
        interrupted call, the arrays are usable only from position 0 on.
        """
        if not position:
            self.dropped = self.settled = 0
        if position - self.dropped + count > self.capacity:
            first = self._first(position)
            by = first - self.dropped
            self.dropped = sys.maxsize  # it stays so if an interrupt comes now
            for start in range(0, position - first, by):
                stop = min(start + by, position - first)
                for head in self._heads:
                    head[start:stop] = head[start + by : stop + by]
            self.dropped, self.settled = first, position
        return self.dropped

    def _first(self, position: int) -> int:
        """Return the position of the oldest token that remains if a step at `position` drops tokens."""
        return (position - self._window + 1) // io.WINDOW_BLOCK * io.WINDOW_BLOCK
