"""uvicorn with a limit on the number of connections, and on how long a connection may idle.

uvicorn alone has no deadline for a request; at its limit, it refuses new requests and keeps idle connections.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

# Together below 1024, the usual limit of open files.
MAX_CONNECTIONS = 900
OTHER_FILES = 96  # open files in addition to connections: model, templates, new connections
BACKLOG = 8  # connections that asyncio accepts in a row, before closed ones have freed their files
QUEUE = 1024  # connections that wait to be accepted; a client beyond tries again after a second
WAIT_SECONDS = 30.0  # for a client to send or to read WAIT_NBYTES
WAIT_NBYTES = 1 << 10
# Read at once, so that a read of tiny chunks does not hold up the event loop.
PIECE_NBYTES = 4 << 10
MAX_HEAD_NBYTES = 64 << 10
MAX_FRAMING_NBYTES = 1 << 20  # bytes of a request's head and chunk sizes
LOG_SECONDS = 60.0
ENDING_SECONDS = 5  # for the last bytes of answers


class Connection(H11Protocol):
    """An HTTP connection. If more than `most` connections are open, an idle one is closed."""

    def __init__(self, most: int, **given: Any) -> None:
        super().__init__(**given)
        self._most = most
        self._received = self._framing = 0  # bytes: in all, and of this request without its body
        self._since, self._moved = 0.0, 0  # start of the wait for WAIT_NBYTES, and bytes then

    @property
    def waits(self) -> bool:
        """True while the server waits for the client to send or to read."""
        cycle = self.cycle
        return self.flow.write_paused or not cycle or cycle.response_complete or cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection; if there are too many, close the one that has waited longest."""
        transport.max_size = PIECE_NBYTES  # type: ignore[attr-defined]  # of asyncio's selectors
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > self._most:
            waiting = [each for each in self.connections if isinstance(each, Connection)]
            longest = min((each for each in waiting if each.waits), key=lambda each: each._since)
            self.connections.discard(longest)
            longest.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse bytes from the client; abort if a request's headers and chunk sizes exceed 1 MiB."""
        self._received += len(data)
        before = len(self.cycle.body) if self.cycle else 0
        super().data_received(data)
        if not self.cycle or not self.cycle.response_complete:
            body = len(self.cycle.body) if self.cycle else 0
            self._framing += len(data) - max(0, body - before)
            if self._framing > MAX_FRAMING_NBYTES:
                self.transport.abort()

    def on_response_complete(self) -> None:
        """Restart the idle timeout: the client may send its next request."""
        self._framing = 0
        self._wait()
        super().on_response_complete()

    def _wait(self) -> None:
        self._since = time.monotonic()
        self._moved = self._received - self.transport.get_write_buffer_size()

    def look(self) -> None:
        """Close the connection if it has waited for its client too long. The server calls it often."""
        moved = self._received - self.transport.get_write_buffer_size() - self._moved
        if not self.waits or moved >= WAIT_NBYTES:
            self._wait()
        elif time.monotonic() - self._since > WAIT_SECONDS:
            self.transport.abort()


class Server(uvicorn.Server):
    """uvicorn with limits on connections. most: largest number at a time; default: `room()`."""

    def __init__(self, program: ASGIApp, most: int | None = None) -> None:
        most = most or room()
        super().__init__(
            uvicorn.Config(
                program,
                loop="asyncio",
                http=lambda **given: Connection(most, **given),  # type: ignore[arg-type]
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
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, with a longer queue of connections that are not accepted yet."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(QUEUE)

    async def on_tick(self, counter: int) -> bool:
        """Close idle connections. Called ten times a second; returns True to end the server."""
        for connection in [*self.server_state.connections]:
            if isinstance(connection, Connection):
                connection.look()
        return await super().on_tick(counter)


def room() -> int:
    """Return the largest number of connections that the limit of open files allows.

    If a connection got no file descriptor, the event loop would try to accept it for ever.
    """
    if sys.platform == "win32":
        return MAX_CONNECTIONS
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, files - OTHER_FILES))


def log_to_stderr() -> None:
    """Let all libraries log to stderr.

    A line of code logs the same kind of error at most once a minute, so that clients cannot fill the log.
    """
    last = dict[tuple[object, ...], float]()

    def is_new(record: logging.LogRecord) -> bool:
        errors = [type(each) for each in record.args or () if isinstance(each, BaseException)]
        cause, now = (record.pathname, record.lineno, *errors), time.monotonic()
        if now - last.get(cause, -LOG_SECONDS) < LOG_SECONDS:
            return False
        last[cause] = now
        return True

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    handler.addFilter(is_new)
    logging.getLogger().addHandler(handler)
