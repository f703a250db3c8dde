"""Text that arrives in deltas, read by coroutines that wait where they need more of it.

So a reader is written as if all of the text were there, and where it is split makes no difference.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]  # yields where it needs more text than has arrived
SPACE = (" ", "\t", "\r", "\n")


class NoCallError(Exception):
    """Raised where text is no call, or no longer one."""


class ArrivingText:
    """Text that has arrived, and of what was taken from it the part that is still held."""

    def __init__(self) -> None:
        self.ended = False
        self._text, self._at = "", 0
        self._held: list[str] = []

    def add(self, text: str) -> None:
        """Append a delta."""
        self._text, self._at = self._text[self._at :] + text, 0

    def release(self) -> str:
        """Return the text that is held, and hold it no longer."""
        text = "".join(self._held)
        self._held.clear()
        return text

    def peek(self) -> Reading[str]:
        """Return the next character, which stays; "" at the end."""
        while self._at == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._at]

    def take(self) -> Reading[str]:
        """Take a character and hold it. Raises NoCallError at the end."""
        char = yield from self.peek()
        if not char:
            raise NoCallError
        self._at += 1
        self._held.append(char)
        return char

    def begins(self, text: str) -> Reading[bool]:
        """Return whether this text comes next."""
        while not self._text.startswith(text, self._at):
            if self.ended or not text.startswith(self._text[self._at :][: len(text)]):
                return False
            yield
        return True

    def skip(self, text: str) -> Reading[bool]:
        """Take this text if it comes next, and nothing otherwise; return whether it came."""
        found = yield from self.begins(text)
        if found:
            self._at += len(text)
            self._held.append(text)
        return found

    def expect(self, text: str) -> Reading[None]:
        """Take this text. Raises NoCallError for any other."""
        if not (yield from self.skip(text)):
            raise NoCallError

    def space(self) -> Reading[None]:
        """Take white space."""
        while (yield from self.peek()) in SPACE:
            yield from self.take()

    def until(self, end: str) -> Reading[str]:
        """Take what comes before this text, and the text itself; return what came before."""
        taken = list[str]()
        while not (yield from self.skip(end)):
            taken.append((yield from self.take()))
        return "".join(taken)

    def while_in(self, allowed: frozenset[str]) -> Reading[str]:
        """Take and return the characters that are allowed."""
        taken = list[str]()
        while (yield from self.peek()) in allowed:
            taken.append((yield from self.take()))
        return "".join(taken)
