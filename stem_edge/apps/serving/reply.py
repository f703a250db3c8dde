"""Pass answers from the compute thread to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import NamedTuple

from stem_edge.apps.answers.events import AnswerEvent, AnswerEvents, Whole
from stem_edge.runtime.rows.rows import RowCounters
from stem_edge.runtime.scheduling.request import Chunk, Request

KEEP_ALIVE_SECONDS = 15.0  # proxies close connections on which nothing comes, often after a minute


class Reply(NamedTuple):
    request: Request
    events: AnswerEvents
    counters: RowCounters  # statistics of rows when the request was submitted


class Replies:
    """All answers to one HTTP request. Create it in the event loop; `close` cancels the answers."""

    def __init__(self, cancel: Callable[[Request], None]) -> None:
        self._made, self._cancel = list[Reply](), cancel
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[tuple[int, Chunk]] = asyncio.Queue()

    def add(self, reply: Reply) -> Callable[[Chunk], None]:
        """Add an answer; return the function by which the compute thread delivers its chunks."""
        self._made.append(reply)
        return partial(self._deliver, len(self._made) - 1)

    def _deliver(self, number: int, chunk: Chunk) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._chunks.put_nowait, (number, chunk))

    def __getitem__(self, number: int) -> Reply:
        return self._made[number]

    def close(self) -> None:
        """Cancel all answers that have not ended; may be called again."""
        for each in self._made:
            self._cancel(each.request)

    async def events(self) -> AsyncGenerator[tuple[int, AnswerEvent] | None]:
        """Yield (number of the answer, event) on arrival, and None now and then as a keep-alive.

        The last event of each answer is `End`. Raises the error that ended an answer.
        """
        left = len(self._made)
        while left:
            try:
                async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                    number, chunk = await self._chunks.get()
            except TimeoutError:
                yield None
                continue
            if chunk.error is not None:
                raise chunk.error
            for event in self._made[number].events.push(chunk):
                yield number, event
            left -= chunk.finish_reason is not None

    async def whole(self) -> list[Whole]:
        """Return the answers once all have ended. Raises the error that ended one."""
        found = [Whole() for _ in self._made]
        async for each in self.events():
            if each is not None:
                found[each[0]].add(each[1])
        return found
