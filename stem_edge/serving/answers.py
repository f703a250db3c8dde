"""Answers in no interface's form, as they come: text, calls of tools, the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from typing import Literal, NamedTuple, Self, TypeAlias

from stem_edge.errors import StemEdgeError
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


Event: TypeAlias = Text | CallBegin | CallArguments | CallEnd | End


class Answering:
    """The answer to a turn, under way; leaving the context manager early cancels it.

    parser: of calls in it; None if there can be none.
    """

    def __init__(self, reply: Reply, parser: CallParser | None) -> None:
        self.reply = reply
        self._parser = parser

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reply.close()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield events, `End` as the last. Raises the error that ended the answer."""
        called = False
        async for chunk in self.reply:
            for event in self._events(chunk):
                called = called or isinstance(event, CallBegin)
                yield event
            if chunk.finish_reason is not None:
                reason: Literal["stop", "tool_calls"] = "tool_calls" if called else "stop"
                yield End("length" if chunk.finish_reason == "length" else reason, chunk.stop)

    def _events(self, chunk: Chunk) -> Iterator[Event]:
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


class Answers(ExitStack):
    """Answers to one turn; leaving the context manager early cancels those that have not ended."""

    def __init__(self, all_: Sequence[Answering]) -> None:
        super().__init__()
        self.all = [self.enter_context(answering) for answering in all_]

    @property
    def first(self) -> Answering:
        """The only one, if no more were asked for."""
        return self.all[0]


async def merged(answers: Sequence[Answering]) -> AsyncGenerator[tuple[int, Event]]:
    """Yield (number of the answer, event) of all answers as they come."""
    if len(answers) == 1:
        async for event in answers[0]:
            yield 0, event
        return
    queue: asyncio.Queue[tuple[int, Event] | Exception | None] = asyncio.Queue()
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
    queue: asyncio.Queue[tuple[int, Event] | Exception | None], number: int, answering: Answering
) -> None:
    try:
        async for event in answering:
            queue.put_nowait((number, event))
        queue.put_nowait(None)
    except StemEdgeError as error:
        queue.put_nowait(error)
