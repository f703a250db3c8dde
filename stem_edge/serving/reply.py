"""Answers as they reach the event loop, and their figures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from stem_edge.answers.events import AnswerEvent, AnswerEvents, Whole
from stem_edge.runtime.generation import Chunk, FinishReason
from stem_edge.runtime.rows.rows import RowCounters
from stem_edge.runtime.scheduling.request import Request
from stem_edge.system.memory import own_memory

KEEP_ALIVE_SECONDS = 15.0  # proxies close connections on which nothing comes, often after a minute


class Reply:
    """An answer under way. The compute thread calls `push` alone.

    deliver: hands a chunk to the event loop. ended: called once, when the answer ends.
    """

    def __init__(
        self,
        request: Request,
        events: AnswerEvents,
        counters: RowCounters,
        deliver: Callable[[Chunk], object],
        ended: Callable[[Reply], None],
    ) -> None:
        self.request, self.events = request, events
        self.counters = counters  # of all rows, when it was submitted
        self.submitted = time.perf_counter()
        self.first_at = 0.0  # when the first token came
        self.outcome: FinishReason | None = None  # None also for a cancelled answer
        self.deliver, self.ended = deliver, ended

    def push(self, chunk: Chunk) -> None:
        """Take more of the answer."""
        if chunk.token_ids:
            self.first_at = self.first_at or time.perf_counter()
        self.outcome = chunk.finish_reason
        if self.outcome is not None:
            self.ended(self)  # first, so that its client finds it counted
        self.deliver(chunk)


class Replies:
    """All answers to one request, made in the event loop; `close` cancels those under way."""

    def __init__(self, cancel: Callable[[Reply], None]) -> None:
        self._made, self._cancel = list[Reply](), cancel
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[tuple[int, Chunk]] = asyncio.Queue()

    def add(
        self,
        request: Request,
        events: AnswerEvents,
        counters: RowCounters,
        ended: Callable[[Reply], None],
    ) -> Reply:
        """Make one more."""
        number = len(self._made)

        def deliver(chunk: Chunk) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._chunks.put_nowait, (number, chunk))

        self._made.append(Reply(request, events, counters, deliver, ended))
        return self._made[-1]

    def __getitem__(self, number: int) -> Reply:
        return self._made[number]

    @property
    def requests(self) -> list[Request]:
        """The requests that are answered."""
        return [each.request for each in self._made]

    def close(self) -> None:
        """Cancel all that have not ended; may be called again."""
        for each in self._made:
            self._cancel(each)

    async def events(self) -> AsyncGenerator[tuple[int, AnswerEvent] | None]:
        """Yield (number of the answer, event) as they come; None after seconds without any.

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


def timings(reply: Reply, now: RowCounters, limit: int) -> dict[str, float]:
    """Return the figures of an answer so far: times in milliseconds, sizes in bytes.

    Rows and flash are those of all answers since this one was submitted. limit: of memory.
    """
    request, before = reply.request, reply.counters
    computed = request.prompt_tokens - request.cached_tokens
    return {
        "prompt_n": computed,
        "cache_n": request.cached_tokens,
        "prompt_ms": request.prompt_seconds * 1e3,
        "prompt_per_second": _rate(computed, request.prompt_seconds),
        "predicted_n": request.new_tokens,
        "predicted_ms": request.decode_seconds * 1e3,
        "predicted_per_second": _rate(request.new_tokens - 1, request.decode_seconds),
        "row_hits": now.hits - before.hits,
        "row_misses": now.misses - before.misses,
        "flash_bytes": now.bytes_read - before.bytes_read,
        "memory_bytes": own_memory(),
        "memory_limit": limit,
    }


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
