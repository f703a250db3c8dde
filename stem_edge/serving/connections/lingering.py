"""The end of a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

SECONDS = 60.0  # for a client to take LEAST_PROGRESS of what it has been sent
LEAST_PROGRESS = 1 << 10  # bytes in the time of a wait that is renewed by progress


class Lingering(asyncio.Transport):
    """A transport whose `close` lets a client that still sends read its answer first.

    Closing a socket with unread bytes resets the connection, and the client loses what it has not read.
    So only our half is closed, until the client closes its own. sends: tells whether it still sends.
    """

    def __init__(self, transport: asyncio.Transport, sends: Callable[[], bool]) -> None:
        super().__init__()
        self._transport, self._sends = transport, sends
        self._closing = False
        self._left = 0  # bytes that the client had not taken when it was last looked at
        self._end: asyncio.TimerHandle | None = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes, unless it has been closed by either side."""
        if not self.is_closing():
            self._transport.write(data)

    def is_closing(self) -> bool:
        """Tell whether nothing is sent any more."""
        return self._closing or self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        """Return the count of bytes that the client has not taken."""
        return self._transport.get_write_buffer_size()

    def close(self, *, lingers: bool = True) -> None:
        """Send what is left, and end. lingers: after a client that still sends has ended, too."""
        if self.is_closing():
            return
        self._closing = True
        if lingers and self._sends():
            self._close_our_half()
        else:
            self._transport.close()
        self._wait()

    def _wait(self) -> None:
        self._left = self.get_write_buffer_size()
        self._end = asyncio.get_running_loop().call_later(SECONDS, self._late)

    def _late(self) -> None:
        """Cut the client off, unless it goes on reading: the whole answer may have been in the buffer."""
        if self._left - self.get_write_buffer_size() >= LEAST_PROGRESS:
            self._wait()
        else:
            self._transport.abort()

    def _close_our_half(self) -> None:
        self._transport.resume_reading()
        try:
            self._transport.write_eof()
        except OSError:  # the client has left
            self._transport.abort()

    def abort(self) -> None:
        """End at once."""
        self._closing = True
        self._transport.abort()

    def forget(self) -> None:
        """Take note that the connection has ended."""
        if self._end is not None:
            self._end.cancel()
