"""Pieces of an answer: text for the user, and calls of tools."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass

from stem_edge.text.tool_calls.arriving import ArrivingText, NoCallError


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """The beginning of a call; index counts the calls of an answer from 0."""

    index: int
    id: str  # as OpenAI's look
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments, which together are the text of a JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The end of a call. A call without it broke off, and its arguments are not complete."""

    index: int


Piece = Content | CallBegin | CallArguments | CallEnd


class Pieces:
    """Pieces of an answer in their order. Each stands for the text that was held when it came.

    names: of the functions that may be called; None allows any.
    """

    def __init__(self, text: ArrivingText, names: Collection[str] | None) -> None:
        self._text, self._names = text, names
        self._pieces: list[Piece] = []
        self._index = -1

    def content(self) -> None:
        """Turn the held text into content."""
        if text := self._text.release():
            self._pieces.append(Content(text))

    def begin(self, name: str) -> None:
        """Begin a call. Raises NoCallError for a function that was not offered."""
        if not name or (self._names is not None and name not in self._names):
            raise NoCallError
        self._text.release()
        self._index += 1
        self._pieces.append(CallBegin(self._index, f"call_{secrets.token_hex(12)}", name))

    def arguments(self, text: str) -> None:
        """Add JSON text to the arguments of the call."""
        self._text.release()
        self._pieces.append(CallArguments(self._index, text))

    def end(self) -> None:
        """End the call."""
        self._text.release()
        self._pieces.append(CallEnd(self._index))

    def taken(self) -> list[Piece]:
        """Return the pieces since the last time, of one kind joined."""
        joined: list[Piece] = []
        for piece in self._pieces:
            match joined[-1:], piece:
                case [Content(before)], Content(text):
                    joined[-1] = Content(before + text)
                case [CallArguments(index, before)], CallArguments(_, text):
                    joined[-1] = CallArguments(index, before + text)
                case _:
                    joined.append(piece)
        self._pieces.clear()
        return joined
