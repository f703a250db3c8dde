"""Answers in no interface's form, as they come: text, calls of tools, the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from typing import Literal, NamedTuple, Self, TypeAlias

from stem_edge.runtime.generation import Chunk
from stem_edge.runtime.sampling import TokenLogprobs
from stem_edge.serving.reply import Reply
from stem_edge.text.tool_calls.parser import CallParser
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


class Answering:
    """The answer to a turn, under way; leaving the context manager early cancels it.

    parser: of calls in it; None if there can be none.
    """

    def __init__(self, reply: Reply, parser: CallParser | None) -> None:
        self.reply = reply
        self._events = AnswerEvents(parser)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reply.close()

    async def __aiter__(self) -> AsyncIterator[AnswerEvent]:
        """Yield events, `End` as the last. Raises the error that ended the answer."""
        async for chunk in self.reply:
            for event in self._events.push(chunk):
                yield event

    async def whole(self) -> Whole:
        """Return the answer once it has ended. Raises the error that ended it."""
        found = Whole()
        async for event in self:
            found.add(event)
        return found


class Answers(ExitStack):
    """Answers to one turn; leaving the context manager early cancels those that have not ended."""

    def __init__(self, all_: Sequence[Answering]) -> None:
        super().__init__()
        self.all = [self.enter_context(answering) for answering in all_]

    @property
    def first(self) -> Answering:
        """The only one, if no more were asked for."""
        return self.all[0]


async def merged(answers: Sequence[Answering]) -> AsyncGenerator[tuple[int, AnswerEvent]]:
    """Yield (number of the answer, event) of all answers as they come."""
    if len(answers) == 1:
        async for event in answers[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, AnswerEvent] | Exception | None] = asyncio.Queue()
    tasks = [asyncio.create_task(_pump(queue, *each)) for each in enumerate(answers)]
    try:
        left = len(tasks)
        while left:
            found = await queue.get()
            if isinstance(found, Exception):
                raise found
            if found is None:
                left -= 1
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()


async def _pump(
    queue: asyncio.Queue[tuple[int, AnswerEvent] | Exception | None],
    number: int,
    answering: Answering,
) -> None:
    try:
        async for event in answering:
            queue.put_nowait((number, event))
        queue.put_nowait(None)
    except Exception as error:  # whatever it is, `merged` must not wait for ever
        queue.put_nowait(error)
