"""KV cache of layers with a sliding window: makes room for new tokens by dropping the oldest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from stem_edge.graph import names as io


class _Shift(NamedTuple):
    base: int = 0  # position of the token in the first row
    by: int = 0  # number of rows to drop at the front; 0 when done
    rows: int = 0  # number of rows that stay
    done: int = 0  # number of these rows that have been moved


class KvWindow:
    """Sliding window of one sequence in KV cache arrays [1, heads, rows, width]. window: in tokens."""

    def __init__(self, arrays: Sequence[npt.NDArray[Any]], window: int) -> None:
        self._heads, self._window = [head for array in arrays for head in array[0]], window
        self.capacity = min(map(len, self._heads))
        self._shift = _Shift()
        # Position of the last step that dropped tokens. From there on, a context that took the same
        # steps has dropped the same tokens, and sums in the same order.
        self.settled = 0

    @property
    def earliest(self) -> int:
        """Earliest position, other than 0, where a step finds all tokens of its window in the arrays."""
        base = self._shift.base + self._shift.by
        return base + self._window - 1 if base else 0

    @property
    def dropped(self) -> int:
        """Number of dropped tokens: the position of the token that is now in the arrays' first row."""
        self._finish()
        return self._shift.base

    def follow(self, dropped: int, settled: int) -> None:
        """Continue another window, whose rows were copied to these arrays.

        dropped: number of tokens that it has dropped. settled: position of the step that last
        dropped some.
        """
        self._shift, self.settled = _Shift(dropped), settled

    def together(self, position: int) -> int:
        """Return how many tokens from `position` on fit without dropping old tokens.

        If no token fits, return how many fit after the next drop.
        """
        base = self._shift.base + self._shift.by
        if (room := self.capacity - position + base) < 1:
            room = self.capacity - position + self._first(position)
        return room

    def make_room(self, position: int, count: int) -> int:
        """Make room for `count` tokens from a position on; return the position of the token in the first row.

        No row that a step at this position reads is dropped. So a step that failed, or an interrupted call
        of this method, can be repeated. Raises ValueError for more tokens than can fit.
        """
        self._finish()
        shift, settled = (self._shift, self.settled) if position else (_Shift(), 0)
        if position - shift.base + count > self.capacity:
            first = self._first(position)
            shift = _Shift(shift.base, first - shift.base, position - first)
            settled = position
        if (most := self.capacity - position + shift.base + shift.by) < count:
            raise ValueError(f"a step has {count} tokens; expected up to {most}")
        self._shift, self.settled = shift, settled
        self._finish()
        return self._shift.base

    def _first(self, position: int) -> int:
        """Return the position of the oldest token that remains if a step at `position` drops tokens."""
        return (position - self._window + 1) // io.WINDOW_BLOCK * io.WINDOW_BLOCK

    def _finish(self) -> None:
        """Complete a pending move of rows to the front, in pieces that can be repeated after an interrupt."""
        base, by, rows, done = self._shift
        while done < rows:
            stop = min(done + by, rows)
            for head in self._heads:
                head[done:stop] = head[done + by : stop + by]
            done = stop
            self._shift = _Shift(base, by, rows, done)
        self._shift = _Shift(base + by)
