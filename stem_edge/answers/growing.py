"""Answers as objects that grow, for interfaces that stream the beginning and end of each part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, TypeAlias

import msgspec

from stem_edge.answers.events import AnswerEvent, End, Text, Thought
from stem_edge.errors import StemEdgeError
from stem_edge.runtime.batching.request import Request
from stem_edge.text.tool_calls.pieces import CallArguments, CallBegin, CallEnd

Told: TypeAlias = dict[str, Any]  # an event of an interface's stream


class Growing(ABC):
    """An answer that grows by events; each gives events of the interface's stream.

    `whole` is the answer without streaming, once `End` has come.
    """

    whole: Told

    def __init__(self) -> None:
        self._parts = list[Told]()
        self._kind: Literal["thought", "text", "call"] = "text"  # of the last part
        self._open = False  # whether it can grow
        self._text = list[str]()  # of the last part: its text, or the JSON of its arguments

    def start(self) -> list[Told]:
        """Return the events before the first part."""
        return []

    def add(self, event: AnswerEvent, request: Request) -> list[Told]:
        """Take the next event of the answer to a request."""
        match event:
            case Thought(text):
                return self._add_text(text, "thought")
            case Text(text) if text:
                return self._add_text(text)
            case CallBegin():
                return self._begin("call", event)
            case CallArguments(_, text):
                return self._grow(text)
            case CallEnd():
                return self._stop()
            case End():
                return self._end(event, request)
        return []

    def _add_text(self, text: str, kind: Literal["thought", "text"] = "text") -> list[Told]:
        begin = [] if self._open and self._kind == kind else self._begin(kind)
        return [*begin, *self._grow(text)]

    def _begin(
        self, kind: Literal["thought", "text", "call"] = "text", call: CallBegin | None = None
    ) -> list[Told]:
        """Begin a part."""
        stopped = self._stop()
        self._kind, self._open = kind, True
        self._parts.append(self._new(call))
        self._text.clear()
        return [*stopped, *self._begun(self._parts[-1])]

    def _grow(self, text: str) -> list[Told]:
        self._text.append(text)
        return [self._more(text)]

    def _stop(self) -> list[Told]:
        """End the part that is open, if one is."""
        if not self._open:
            return []
        self._open = False
        return self._stopped(self._parts[-1], "".join(self._text))

    @property
    def _index(self) -> int:
        """Number of the last part."""
        return len(self._parts) - 1

    @abstractmethod
    def failed(self, error: StemEdgeError) -> Told:
        """Return the event of an error that ends the answer."""

    @abstractmethod
    def _new(self, call: CallBegin | None) -> Told:
        """Return a part that begins: a call, or one of this kind without text."""

    @abstractmethod
    def _begun(self, part: Told) -> list[Told]:
        """Return the events of a part that begins."""

    @abstractmethod
    def _more(self, text: str) -> Told:
        """Return the events of more text of the last part."""

    @abstractmethod
    def _stopped(self, part: Told, text: str) -> list[Told]:
        """Complete a part with its text; return the events of its end."""

    @abstractmethod
    def _end(self, end: End, request: Request) -> list[Told]:
        """Make `whole`, and return the last events."""


def call_input(text: str) -> dict[str, Any]:
    """Return the arguments of a call, which may not be JSON if no grammar led the model."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        return {"INVALID_JSON": text}
