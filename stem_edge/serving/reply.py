"""Answers as they reach the event loop: the chunks of one, and the events of all answers to a turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from typing import Self

from stem_edge.answers.events import AnswerEvent, AnswerEvents, Whole
from stem_edge.runtime.batching.request import Request
from stem_edge.runtime.generation import Chunk, FinishReason
from stem_edge.runtime.rows.records import RowCounters


class Reply:
    """Chunks of an answer; `close` cancels it.

    Made in the event loop by Compute.submit. The compute thread calls `push` alone. leave: ends it for
    a client that has left. ended: is told when it has ended otherwise.
    """

    def __init__(
        self,
        request: Request,
        counters: RowCounters,
        leave: Callable[[Reply], None],
        ended: Callable[[Reply], None],
    ) -> None:
        self.request, self.counters = request, counters  # of all rows, as it was submitted
        self.submitted = time.perf_counter()
        self.first_at = 0.0  # when the first token came
        self.outcome: FinishReason | None = None  # also of one that was cancelled
        self._leave, self._ended = leave, ended
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[Chunk] = asyncio.Queue()

    def push(self, chunk: Chunk) -> None:
        """Hand a chunk to the event loop, from any thread."""
        if chunk.token_ids:
            self.first_at = self.first_at or time.perf_counter()
        self.outcome = chunk.finish_reason
        if self.outcome is not None:
            self._ended(self)  # first, so that its client finds it counted
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._chunks.put_nowait, chunk)

    def close(self) -> None:
        """Cancel it unless it has ended; may be called again."""
        self._leave(self)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """Yield chunks until one has a finish_reason. Raises the error that ended the answer."""
        while True:
            chunk = await self._chunks.get()
            if chunk.error is not None:
                raise chunk.error
            yield chunk
            if chunk.finish_reason is not None:
                return


class TurnAnswer:
    """The answer to a turn, under way; leaving the context manager early cancels it."""

    def __init__(self, reply: Reply, events: AnswerEvents) -> None:
        self.reply, self._events = reply, events

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


class TurnAnswers(ExitStack):
    """Answers to one turn; leaving the context manager early cancels those that have not ended."""

    def __init__(self, all_: Sequence[TurnAnswer]) -> None:
        super().__init__()
        self.all = [self.enter_context(answering) for answering in all_]

    @property
    def first(self) -> TurnAnswer:
        """The only one, if no more were asked for."""
        return self.all[0]


async def merged(answers: Sequence[TurnAnswer]) -> AsyncGenerator[tuple[int, AnswerEvent]]:
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
    answering: TurnAnswer,
) -> None:
    try:
        async for event in answering:
            queue.put_nowait((number, event))
        queue.put_nowait(None)
    except Exception as error:  # whatever it is, `merged` must not wait for ever
        queue.put_nowait(error)
