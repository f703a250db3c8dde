"""Answers in no interface's form, as they come: text, calls of tools, the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from stem_edge.runtime.generation import Chunk
from stem_edge.runtime.sampling import TokenLogprobs
from stem_edge.text.tool_calls.family import CallParser
from stem_edge.text.tool_calls.pieces import CallArguments, CallBegin, CallEnd, Content


class Text(NamedTuple):
    """More text of an answer."""

    text: str
    logprobs: Sequence[TokenLogprobs] | None = None  # if asked for, of tokens up to here


class End(NamedTuple):
    """The end of an answer."""

    reason: Literal["stop", "length", "tool_calls"]
    stop: str | None  # the stop text that ended it


AnswerEvent: TypeAlias = Text | CallBegin | CallArguments | CallEnd | End


class AnswerEvents:
    """Makes events of the chunks of one answer. parser: of calls in it; None if there can be none."""

    def __init__(self, parser: CallParser | None) -> None:
        self._parser, self._called = parser, False

    def push(self, chunk: Chunk) -> Iterator[AnswerEvent]:
        """Yield what a chunk has, `End` as the last of all."""
        for event in self._pieces(chunk):
            if isinstance(event, CallBegin | CallEnd):
                self._called = isinstance(event, CallEnd)  # one may break off, even after others
            yield event
        if chunk.finish_reason is not None:
            reason: Literal["stop", "tool_calls"] = "tool_calls" if self._called else "stop"
            yield End("length" if chunk.finish_reason == "length" else reason, chunk.stop)

    def _pieces(self, chunk: Chunk) -> Iterator[AnswerEvent]:
        if self._parser is None:
            if chunk.text or chunk.logprobs:
                yield Text(chunk.text, chunk.logprobs)
            return
        if chunk.logprobs:
            yield Text("", chunk.logprobs)
        pieces = self._parser.push(chunk.text)
        if chunk.finish_reason is not None:
            pieces += self._parser.finish()
        for piece in pieces:
            yield Text(piece.text) if isinstance(piece, Content) else piece


class Whole:
    """An answer that is collected until its end."""

    def __init__(self) -> None:
        self.text, self.reason = "", ""
        self.calls = list[dict[str, str]]()  # id, name and arguments of each
        self.logprobs: list[TokenLogprobs] | None = None  # if asked for

    def add(self, event: AnswerEvent) -> None:
        """Take the next event."""
        match event:
            case Text(more, found):
                self.text += more
                if found is not None:
                    self.logprobs = [*(self.logprobs or ()), *found]
            case CallBegin(_, id_, name):
                self.calls.append({"id": id_, "name": name, "arguments": ""})
            case CallArguments(number, more):
                self.calls[number]["arguments"] += more
            case End(ended, _):
                self.reason = ended
