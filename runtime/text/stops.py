"""Ends streamed text before the first stop text."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Receives text in pieces, and returns the parts that certainly precede any stop text.

    If several stop texts end at the same character, the longest counts.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop, self._held = tuple(stop), ""  # text that may begin a stop text
        self.found: str | None = None  # the stop text that ended the text

    def push(self, text: str) -> str:
        """Append `text`; return the part that is final, and hold back the rest."""
        if self.found is not None:
            return ""
        text = self._held + text
        # (end, start): the stop text that is complete first wins, so that the result does not depend
        # on how the text was split into tokens.
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            end, start = min(found)
            self.found, self._held = text[start:end], ""
            return text[:start]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
