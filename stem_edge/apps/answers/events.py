"""Events of an answer while it is generated: reasoning, text, tool calls, the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

from stem_edge.runtime.sampling import TokenLogprobs
from stem_edge.runtime.scheduling.request import Chunk
from stem_edge.text.thoughts import ThoughtParser
from stem_edge.text.tool_calls.parser import Call, CallParser


class Text(NamedTuple):
    text: str
    logprobs: Sequence[TokenLogprobs] | None = None  # of a chunk's tokens, if requested


class Thought(NamedTuple):
    text: str


class End(NamedTuple):
    reason: Literal["stop", "length", "tool_calls"]


AnswerEvent: TypeAlias = Thought | Text | Call | End


class AnswerEvents:
    """Converts chunks of an answer to events; parsers find reasoning and tool calls in it."""

    def __init__(
        self, thoughts: ThoughtParser | None = None, calls: CallParser | None = None
    ) -> None:
        self._thoughts, self._calls, self._called = thoughts, calls, False

    def push(self, chunk: Chunk) -> Iterator[AnswerEvent]:
        """Yield the events of a chunk; the last event of an answer is `End`."""
        text, logprobs, ended = chunk.text, chunk.logprobs, chunk.finish_reason is not None
        if self._thoughts is not None:
            thought, text = self._thoughts.push(text, ended=ended)
            if thought:
                yield Thought(thought)
        calls: Sequence[str | Call] = ()
        if self._calls is not None:
            calls, text = self._calls.push(text, ended=ended), ""
        if text or logprobs:
            yield Text(text, logprobs)
        for piece in calls:
            self._called |= isinstance(piece, Call)
            yield Text(piece) if isinstance(piece, str) else piece
        if ended:
            reason: Literal["stop", "tool_calls"] = "tool_calls" if self._called else "stop"
            yield End("length" if chunk.finish_reason == "length" else reason)


class Whole:
    """A whole answer, collected from its events."""

    def __init__(self) -> None:
        self.thoughts, self.text, self.reason = "", "", ""
        self.calls = list[Call]()
        self.logprobs: list[TokenLogprobs] | None = None  # of all tokens, if requested

    def add(self, event: AnswerEvent) -> None:
        match event:
            case Thought(more):
                self.thoughts += more
            case Text(more, found):
                self.text += more
                if found is not None:
                    self.logprobs = self.logprobs or []
                    self.logprobs += found
            case Call():
                self.calls.append(event)
            case End(ended):
                self.reason = ended
