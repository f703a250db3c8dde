"""Answers as they reach the event loop: the events of one, and of all answers to a request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

from stem_edge.answers.events import AnswerEvent, AnswerEvents, Whole
from stem_edge.runtime.generation import Chunk, FinishReason
from stem_edge.runtime.rows.records import RowCounters
from stem_edge.runtime.scheduling.request import Request


class Reply:
    """Events of an answer under way; `close` cancels it.

    Made in the event loop by Compute.submit. The compute thread calls `push` alone. leave: ends it for
    a client that has left. ended: is told when it has ended otherwise.
    """

    def __init__(
        self,
        request: Request,
        events: AnswerEvents,
        counters: RowCounters,
        leave: Callable[[Reply], None],
        ended: Callable[[Reply], None],
    ) -> None:
        self.request, self._events = request, events
        self.counters = counters  # of all rows, as it was submitted
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

    async def __aiter__(self) -> AsyncIterator[AnswerEvent]:
        """Yield events, `End` as the last. Raises the error that ended the answer."""
        while True:
            chunk = await self._chunks.get()
            if chunk.error is not None:
                raise chunk.error
            for event in self._events.push(chunk):
                yield event
            if chunk.finish_reason is not None:
                return

    async def whole(self) -> Whole:
        """Return the answer once it has ended. Raises the error that ended it."""
        found = Whole()
        async for event in self:
            found.add(event)
        return found


async def merged(answers: Sequence[Reply]) -> AsyncGenerator[tuple[int, AnswerEvent]]:
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
    reply: Reply,
) -> None:
    try:
        async for event in reply:
            queue.put_nowait((number, event))
        queue.put_nowait(None)
    except Exception as error:  # whatever it is, `merged` must not wait for ever
        queue.put_nowait(error)
