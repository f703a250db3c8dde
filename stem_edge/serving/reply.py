"""The answer to one prompt, as it reaches the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from stem_edge.runtime.batching.request import Request
from stem_edge.runtime.generation import Chunk, FinishReason
from stem_edge.runtime.rows.records import RowCounters


class Reply:
    """Chunks of an answer; `close` cancels it.

    Made in the event loop by Compute.submit. The compute thread calls `push` alone.
    """

    def __init__(
        self, request: Request, leave: Callable[[Reply], None], counters: RowCounters
    ) -> None:
        self.request, self.counters = request, counters  # of all rows, as it was submitted
        self.submitted = time.perf_counter()
        self.first_at = 0.0  # when the first token came
        self.outcome: FinishReason | None = (
            None  # while it is under way, and of one that was cancelled
        )
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[Chunk] = asyncio.Queue()

    def push(self, chunk: Chunk) -> None:
        """Hand a chunk to the event loop, from any thread."""
        if chunk.token_ids:
            self.first_at = self.first_at or time.perf_counter()
        self.outcome = chunk.finish_reason
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
