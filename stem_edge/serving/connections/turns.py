"""Whose turn it is on a connection, the time for it, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from typing import Any, NamedTuple

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from stem_edge.answers.refusals import BusyError, RefusalError, TooSlowError
from stem_edge.serving.connections.lingering import LEAST_PROGRESS, SECONDS, Lingering
from stem_edge.serving.http import error_response

LOOK_SECONDS = 0.1  # between looks whether a client that has closed its half is there
LEAVING_IS_SEEN = sys.platform != "win32"  # by SO_ERROR, when nothing is read any more
# Bytes that the system holds and has not sent. With more, a slow reader would seem not to read.
UNSENT_NBYTES = 16 << 10
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Wait(NamedTuple):
    """What is waited for from a client, and how long. renewed: as long as bytes move."""

    seconds: float
    told: str | None = None  # to a client that is too late
    renewed: bool = False


REQUEST = Wait(75)
HEAD = Wait(20, "the head of the request has not come within 20 s")
BODY = Wait(30, "less than 1 KiB of the body has come within 30 s", renewed=True)
READER = Wait(SECONDS, renewed=True)  # that takes what it is sent


class Waiting(HttpToolsProtocol):
    """A connection that waits for its client for a limited time, and makes room for others if it waits.

    Where there are too many, the one that has waited longest for its client is ended.
    """

    transport: Lingering

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        # Not in uvicorn's way, which answers 503 to the last client to come.
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self._running: RequestResponseCycle | None = None  # its answer is not yet sent
        self._in_head = False  # the head of a request has begun to come
        self._chunks = list[bytes]()  # of a body, as they are read
        self._head_nbytes = self._wire_nbytes = self._body_nbytes = 0
        self._wait: Wait | None = None
        self.waits_since: float | None = None  # for its client
        self.gives_way = False
        self._timer: asyncio.TimerHandle | None = None
        self._moved = 0

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, if need be in the place of another connection."""
        super().connection_made(transport)
        self._socket: socket.socket = transport.get_extra_info("socket")
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # on Linux and macOS
            with contextlib.suppress(OSError):  # macOS refuses it on a socket that was reset
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_NBYTES)
        self.transport = Lingering(transport, self._is_sent)
        self._turn()
        others = [
            each for each in self.connections if isinstance(each, Waiting) and each is not self
        ]
        staying = [each for each in others if not each.gives_way]
        if self._most is not None and len(staying) >= self._most:
            waiting = [each for each in staying if each.waits_since is not None]
            min(waiting, key=lambda each: each.waits_since or 0.0, default=self).leave_place()

    def connection_lost(self, exc: Exception | None) -> None:
        """End, and tell the request whose answer is not sent."""
        super().connection_lost(exc)
        self.transport.forget()
        if self._timer is not None:
            self._timer.cancel()
        if self._running is not None:
            self._running.disconnected = True
            self._running.message_event.set()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Go on for a client that has sent all it wants to; end for one that has left.

        The system tells no difference. A client that has left resets the connection when it gets
        something more, and by HTTP/1.1 one that waits skips what is sent here.
        """
        running = self._running
        if running is None or running.more_body or self.transport.is_closing():
            return False
        if not LEAVING_IS_SEEN or running.scope["http_version"] == "1.0":
            return False
        self.cycle.keep_alive = False  # of the last request that came
        if not running.response_started:
            self.transport.write(CONTINUE)
        elif running.chunked_encoding:
            self.transport.write(b"0")  # before the size of the next chunk
        self._look()
        return True

    def _look(self) -> None:
        """End if the client has left; nothing else looks, since there is nothing more to read."""
        if self.transport.is_closing():
            return
        if self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(LOOK_SECONDS, self._look)

    def shutdown(self) -> None:
        """End at the end of the server, after an answer that is under way."""
        if self._wait in (REQUEST, HEAD, BODY):
            self.transport.close(lingers=False)
        else:
            super().shutdown()

    # Whose turn it is

    def _turn(self) -> None:
        """Find out who is to act next, and begin to count the time."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._wait = self._awaited()
        self.waits_since = None if self._wait is None else self.loop.time()
        if self._wait is not None:
            self._moved = self._wire_nbytes - self.transport.get_write_buffer_size()
            self._timer = self.loop.call_later(self._wait.seconds, self._late)

    def _awaited(self) -> Wait | None:
        if self.flow.write_paused or self.transport.is_closing():
            return READER
        if self._running is None:
            return HEAD if self._in_head else REQUEST
        return BODY if self._running.more_body else None

    def _late(self) -> None:
        wait = self._wait
        if wait is None or self.transport.is_closing():
            return
        moved = self._wire_nbytes - self.transport.get_write_buffer_size() - self._moved
        if wait.renewed and moved >= LEAST_PROGRESS:
            self._turn()
        elif wait.told is not None:
            self.refuse(TooSlowError(wait.told))
        elif wait is READER:
            self.transport.abort()
        else:
            self.transport.close()

    def _is_sent(self) -> bool:
        """Tell whether a request is being sent."""
        return self._in_head or (self._running is not None and self._running.more_body)

    def pause_writing(self) -> None:
        """Wait for a client that does not read."""
        super().pause_writing()
        self._turn()

    def resume_writing(self) -> None:
        """Go on with it."""
        super().resume_writing()
        self._turn()

    # The end

    def refuse(self, error: RefusalError) -> None:
        """Answer with an error of HTTP itself, and end. What an earlier request asked is answered first."""
        running = self._running
        self._in_head = True  # whatever else comes, too, is of a request that is not read
        if running is None:
            self.transport.write(_response(error))
        elif running.more_body:
            if not running.response_started:
                self.transport.write(_response(error))
            running.disconnected = True
            running.message_event.set()
        else:
            self.pipeline.clear()
            running.keep_alive = False
            return
        self.transport.close()

    def leave_place(self) -> None:
        """End at once, because another connection needs the place."""
        self.gives_way = True
        if self.transport.is_closing() or self.flow.write_paused:
            self.transport.abort()
            return
        if (
            self._wait is not REQUEST or self.cycle is None
        ):  # else nothing was asked since the last answer
            self.transport.write(_response(BusyError("the server has too many connections")))
        self.transport.close(lingers=False)


def _response(error: RefusalError) -> bytes:
    response = error_response(error)
    lines = [STATUS_LINE[response.status_code]]
    for name, value in (*response.raw_headers, (b"connection", b"close")):
        lines += [name, b": ", value, b"\r\n"]
    return b"".join([*lines, b"\r\n", bytes(response.body)])
