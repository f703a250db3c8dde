"""Pass answers from the compute thread to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import NamedTuple

from stem_edge.apps.answers.events import AnswerEvent, AnswerEvents, Whole
from stem_edge.apps.answers.refusals import RefusalError
from stem_edge.runtime.rows.rows import RowCounters
from stem_edge.runtime.scheduling.request import Chunk, Request

KEEP_ALIVE_SECONDS = 15.0  # proxies close connections on which nothing comes, often after a minute
# Memory of a token that waits to be sent, and of a log probability until it is sent: as objects and as JSON.
TOKEN_NBYTES = 450


class Reply(NamedTuple):
    request: Request
    events: AnswerEvents
    counters: RowCounters  # statistics of rows when the request was submitted


class Replies:
    """All answers to one HTTP request. Create it in the event loop; `close` cancels the answers.

    hold: counts bytes of the request. If it raises RefusalError, the answers end with this error.
    """

    def __init__(self, cancel: Callable[[Request], None], hold: Callable[[int], None]) -> None:
        self.made, self._cancel, self._hold, self._closed = list[Reply](), cancel, hold, False
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[tuple[int, Chunk, int]] = asyncio.Queue()

    def add(self, reply: Reply) -> Callable[[Chunk], None]:
        """Add an answer; return the function by which the compute thread delivers its chunks."""
        self.made.append(reply)
        return partial(self._deliver, len(self.made) - 1)

    def _deliver(self, number: int, chunk: Chunk) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put, number, chunk)

    def _put(self, number: int, chunk: Chunk) -> None:
        if self._closed:
            return
        probabilities = sum(1 + len(each.top) for each in chunk.logprobs or ())
        nbytes = TOKEN_NBYTES * (len(chunk.token_ids) + probabilities)
        try:
            self._hold(nbytes)
        except RefusalError as error:
            chunk = Chunk("", [], None, "error", error.with_traceback(None))
            self.close()
        self._chunks.put_nowait((number, chunk, nbytes))

    def close(self) -> None:
        """Cancel all answers that have not ended; may be called again."""
        self._closed = True
        for each in self.made:
            self._cancel(each.request)

    async def events(self, whole: bool = False) -> AsyncGenerator[tuple[int, AnswerEvent] | None]:
        """Yield (number of the answer, event) on arrival, and None now and then as a keep-alive.

        whole: True if the caller keeps the log probabilities until all answers have ended.
        The last event of each answer is `End`. Raises the error that ended an answer.
        """
        left = len(self.made)
        while left:
            try:
                async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                    number, chunk, nbytes = await self._chunks.get()
            except TimeoutError:
                yield None
                continue
            if chunk.error is not None:
                raise chunk.error
            for event in self.made[number].events.push(chunk):
                yield number, event
            if not (whole and chunk.logprobs):
                self._hold(-nbytes)
            left -= chunk.finish_reason is not None

    async def whole(self) -> list[Whole]:
        """Return the answers once all have ended. Raises the error that ended one."""
        found = [Whole() for _ in self.made]
        async for each in self.events(whole=True):
            if each is not None:
                found[each[0]].add(each[1])
        return found
