"""Connections of clients: how many there may be, how long they may wait, and how uvicorn is run.

uvicorn has no deadline for a request, and at a limit of connections it refuses those that ask, not those that idle.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from stem_edge.answers.refusals import RefusalError

MAX_CONNECTIONS = 1000
OTHER_FILES = (
    96  # open files beside connections: of the model, of templates, and just accepted connections
)
BACKLOG = 8  # connections that asyncio accepts at once, before those that make room have ended
WAIT_SECONDS = 30.0  # for a client to send or to read WAIT_NBYTES
WAIT_NBYTES = 1 << 10
PIECE_NBYTES = (
    4 << 10
)  # read at once, so that a read of tiny chunks does not hold up the event loop
MAX_HEAD_NBYTES = 64 << 10
MAX_FRAMING_NBYTES = 1 << 20  # bytes of chunks' sizes beyond those of the body itself
MAX_UNREAD_NBYTES, UNREAD_SECONDS = 16 << 20, 1.0  # of a body that is refused before its end
LOG_SECONDS = 60.0
ENDING_SECONDS = 5  # for the last bytes of answers


class Connection(asyncio.BufferedProtocol):
    """A connection that is closed when its client keeps it waiting, or when another client needs its place."""

    def __init__(self, http: asyncio.Protocol, others: dict[Any, Connection], most: int) -> None:
        self._http, self._others, self._most = http, others, most
        self._piece = bytearray(PIECE_NBYTES)
        self._answering = self._unread = False
        self._timer: asyncio.TimerHandle | None = None
        self._moved = 0  # bytes sent by or to the client, at the last look
        self.received = 0  # bytes
        self.waits_since: float | None = None  # for its client

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, if need be the place of the connection that has waited longest for its client."""
        self._transport, self._client = transport, transport.get_extra_info("peername")[:2]
        self._http.connection_made(transport)
        self._others[self._client] = self
        self._wait()
        if len(self._others) > self._most:
            waiting = [each for each in self._others.values() if each.waits_since is not None]
            min(waiting, key=lambda each: each.waits_since or 0.0).end()

    def end(self) -> None:
        """Close at once."""
        self._others.pop(self._client, None)
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place back."""
        if self._others.get(self._client) is self:
            del self._others[self._client]
        if self._timer is not None:
            self._timer.cancel()
        self._http.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> bytearray:
        """Return where the next bytes are read into."""
        return self._piece

    def buffer_updated(self, nbytes: int) -> None:
        """Read more of a request."""
        self.received += nbytes
        self._http.data_received(bytes(self._piece[:nbytes]))

    def eof_received(self) -> bool | None:
        """End: a client that closes its half has left."""
        return self._http.eof_received()

    def pause_writing(self) -> None:
        """Wait for a client that does not read."""
        self._unread = True
        self._wait()
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Go on with a client that reads."""
        self._unread = False
        self._wait()
        self._http.resume_writing()

    def answer(self, begun: bool) -> None:
        """Take note that a whole request has come, or that its answer has ended."""
        self._answering = begun
        self._wait()

    def _wait(self) -> None:
        """Begin or end to wait for the client."""
        if self._timer is not None:
            self._timer.cancel()
        waits, loop = self._unread or not self._answering, asyncio.get_running_loop()
        self.waits_since = loop.time() if waits else None
        self._timer = loop.call_later(WAIT_SECONDS, self._late) if waits else None
        self._moved = self.received - self._transport.get_write_buffer_size()

    def _late(self) -> None:
        moved = self.received - self._transport.get_write_buffer_size() - self._moved
        if moved >= WAIT_NBYTES:
            self._wait()
        else:
            self._transport.abort()


class Connections:
    """Connections of a server, and the program that answers their requests. most: open at a time."""

    def __init__(self, program: ASGIApp, most: int) -> None:
        self._program, self._most = program, most
        self._open = dict[Any, Connection]()  # by address of the client

    def protocol(self, **given: Any) -> Connection:
        """Return the protocol of a new connection, with what uvicorn gives to protocols."""
        return Connection(H11Protocol(**given), self._open, self._most)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and let its connection know whose turn it is."""
        connection = self._open.get(scope.get("client"))
        if connection is None:
            await self._program(scope, receive, send)
            return
        body, before, more = 0, connection.received, True

        async def received() -> Message:
            nonlocal body, more
            message = await receive()
            body += len(message.get("body", b""))
            if connection.received - before - 2 * body > MAX_FRAMING_NBYTES:
                more = False
                raise RefusalError("the chunks of the body are too small; send larger ones")
            if more and not message.get("more_body"):
                more = False
                connection.answer(begun=True)
            return message

        async def sent(message: Message) -> None:
            # To close a connection with unread bytes would reset it, and the client would lose the answer.
            with suppress(TimeoutError):
                async with asyncio.timeout(UNREAD_SECONDS):
                    while more and connection.received - before < MAX_UNREAD_NBYTES:
                        await received()
            await send(message)

        try:
            await self._program(scope, received, sent)
        finally:
            connection.answer(begun=False)


def config_of(program: ASGIApp, most: int | None = None) -> uvicorn.Config:
    """Return how to run a program. most: connections (as many as open files allow)."""
    connections = Connections(program, most or room())
    protocol: Callable[..., asyncio.BaseProtocol] = connections.protocol
    return uvicorn.Config(
        connections,
        loop="asyncio",
        http=protocol,  # type: ignore[arg-type]  # a function that makes protocols does as well
        h11_max_incomplete_event_size=MAX_HEAD_NBYTES,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=int(WAIT_SECONDS),
        timeout_graceful_shutdown=ENDING_SECONDS,
    )


def room() -> int:
    """Return how many connections there may be, after raising the limit of open files.

    Without a file for a connection, the event loop would try to accept it for ever.
    """
    if sys.platform == "win32":
        return MAX_CONNECTIONS
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    wanted = MAX_CONNECTIONS + OTHER_FILES
    files = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return max(1, min(MAX_CONNECTIONS, max(soft, files) - OTHER_FILES))


class Quiet(logging.Filter):
    """Lets one record a minute through for each place that logs and kind of error there."""

    def __init__(self) -> None:
        super().__init__()
        self._last = dict[tuple[object, ...], float]()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a record."""
        errors = [type(each) for each in record.args or () if isinstance(each, BaseException)]
        cause, now = (record.pathname, record.lineno, *errors), time.monotonic()
        if now - self._last.get(cause, -LOG_SECONDS) < LOG_SECONDS:
            return False
        self._last[cause] = now
        return True


def log_to_stderr() -> logging.Handler:
    """Let all libraries log to stderr, quietly; return the handler of it."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    handler.addFilter(Quiet())
    logging.getLogger().addHandler(handler)
    return handler
