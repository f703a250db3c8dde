"""Guesses at the tokens of an answer, as decoding takes them."""

from __future__ import annotations

from collections.abc import Sequence


class Guesses:
    """Drafts for one answer; this base class has none."""

    quick = True  # whether a token may wait for what follows it

    def after(self, seen: Sequence[int], room: int) -> list[int]:
        """Return guesses at what follows the prompt and answer so far: at most `room` tokens.

        `seen` begins with what it was at the call before.
        """
        return []


NO_GUESSES = Guesses()
