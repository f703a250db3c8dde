"""Events of a stream, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from contextlib import AbstractContextManager, aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from stem_edge.answers.refusals import openai_error, public

T = TypeVar("T")

KEEP_ALIVE_SECONDS = 15.0  # proxies close connections on which nothing comes, often after a minute
COMMENT = b":\n\n"  # which clients skip
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would hold events back
}


class ClientLeftError(Exception):
    """The client of a request has closed its connection."""


def event(data: object) -> bytes:
    """Return a server-sent event of JSON."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class EventStream(Response):
    """A response of server-sent events that ends as soon as its client leaves.

    events: encoded by `event`, as the model makes them. held: the answers they come from, which are
    cancelled when the response ends early.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        held: AbstractContextManager[object],
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]  # which Response knows as 0
        self._events, self._held = events, held
        self._last = 0.0  # when something was sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        with self._held:
            try:
                async with aclosing(self._events):
                    await until_left(receive, self._send_all(send))
            except (ClientLeftError, OSError):  # servers since ASGI 2.4 raise OSError
                return

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        self._last = _now()
        keeping = asyncio.create_task(self._keep_alive(send))
        try:
            await self._send_events(send)
        finally:
            keeping.cancel()
        await send({"type": "http.response.body", "body": b""})

    async def _send_events(self, send: Send) -> None:
        async for data in self._with_error():
            self._last = _now()
            await send(_body(data))

    async def _with_error(self) -> AsyncGenerator[bytes]:
        """Yield the events, and one that tells of the error that ended them."""
        try:
            async for data in self._events:
                yield data
        except Exception as error:
            yield event(openai_error(public(error)))

    async def _keep_alive(self, send: Send) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._last + KEEP_ALIVE_SECONDS - _now()))
            if _now() - self._last >= KEEP_ALIVE_SECONDS:
                self._last = _now()
                await send(_body(COMMENT))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _body(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


async def until_disconnected(request: Request, answer: Coroutine[Any, Any, T]) -> T:
    """Return what an answer that is not streamed returns; its body must have been read.

    Cancels it and raises ClientLeftError as soon as the client leaves.
    """
    return await until_left(request.receive, answer)


async def until_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; cancel it and raise ClientLeftError once the client leaves."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        leaving.result()
        raise ClientLeftError
    finally:
        await _cancelled(working)
        await _cancelled(leaving)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(task: Awaitable[object]) -> None:
    """Cancel a task and wait for it, so that what it holds is given back."""
    future = asyncio.ensure_future(task)
    future.cancel()
    await asyncio.wait((future,))
    if not future.cancelled():
        future.exception()  # raised already, or the client has left
