"""Pieces of an answer: text for the user, and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass


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
