"""One connection: its requests are refused by HTTP's rules, or answered."""

from __future__ import annotations

import httptools
from uvicorn._types import ASGI3Application, ASGIReceiveCallable, ASGISendCallable, ASGISendEvent
from uvicorn._types import Scope as AnyScope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from stem_edge.answers.refusals import HeadTooLargeError, RefusalError
from stem_edge.serving.connections.turns import Waiting

MAX_HEAD_NBYTES = 64 << 10  # of a request: its line and its headers
# Of a body: bytes of chunks' sizes, extensions and trailers beyond those of the body itself.
MAX_FRAMING_NBYTES = 1 << 20
# Of what is read: a head counts from the piece after that in which it begins.
PIECE_NBYTES = 4 << 10


class Connection(Waiting):
    """A connection that reads requests strictly, so that a proxy before it reads them in the same way."""

    def data_received(self, data: bytes) -> None:
        """Read more of requests."""
        self._unset_keepalive_if_required()
        self._wire_nbytes += len(data)
        if self.transport.is_closing():  # refused already
            return
        at = 0
        try:
            while at < len(data) and not self.transport.is_closing():
                at += self._read(data[at : at + PIECE_NBYTES])
            self._join_chunks()
            self._check_framing()
        except httptools.HttpParserError as error:
            cause = error.__context__
            told = f"this is no request of HTTP/1.1: {error}; correct it"
            self.refuse(cause if isinstance(cause, RefusalError) else RefusalError(told))
        except RefusalError as error:
            self.refuse(error)

    def _read(self, piece: bytes) -> int:
        """Read a piece, or its beginning that ends a request for another protocol; return its length."""
        self._head_nbytes += len(piece)  # before a head may begin, which may follow another body
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_without_upgrade()
            return int(upgrade.args[0])
        if self._in_head:
            _check_head(self._head_nbytes)
        return len(piece)

    def _check_framing(self) -> None:
        if self._wire_nbytes - 2 * self._body_nbytes > MAX_FRAMING_NBYTES:
            raise RefusalError("the chunks of the body are too small; send larger ones")

    def _read_without_upgrade(self) -> None:
        """Read a request that asks for another protocol as if it did not, as HTTP allows.

        The parser takes what follows for the other protocol.
        """
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            if name not in (b"upgrade", b"connection", b"http2-settings"):
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(b"".join([*head, b"\r\n"]))

    def on_message_begin(self) -> None:
        """Begin to read a head."""
        super().on_message_begin()
        self._in_head, self._head_nbytes = True, 0
        if self._running is None:
            self._turn()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; ignore those after the body."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer a request, unless it asks for another protocol. Raises RefusalError."""
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise RefusalError("this server is no proxy, so it has no CONNECT")
            return
        _check_head(len(self.url) + sum(len(name) + len(value) for name, value in self.headers))
        if sum(name == b"host" for name, _ in self.headers) > 1:
            raise RefusalError("the request has several headers Host; send one")
        self._in_head = False
        self._wire_nbytes = self._body_nbytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Keep a chunk of the body; nothing more, because it may be one of 50,000 in a read."""
        self._chunks.append(body)

    def _join_chunks(self) -> None:
        """Give the chunks that have come to the request."""
        if body := b"".join(self._chunks):
            self._chunks.clear()
            self._body_nbytes += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Let the request be answered."""
        if not self._in_head:
            self._join_chunks()
            super().on_message_complete()
            self._turn()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Let a request be answered; an answer before its end is the last of the connection."""

        async def ending(
            scope: AnyScope, receive: ASGIReceiveCallable, send: ASGISendCallable
        ) -> None:
            async def sent(message: ASGISendEvent) -> None:
                if message["type"] == "http.response.start" and cycle.more_body:
                    cycle.keep_alive = False
                await send(message)

            await app(scope, receive, sent)

        self._running = cycle
        self._turn()
        super()._start_asgi_task(cycle, ending)

    def on_response_complete(self) -> None:
        """Go on with the next request."""
        if not self.transport.is_closing():
            self._running = None
        super().on_response_complete()
        self._turn()


def _check_head(nbytes: int) -> None:
    if nbytes > MAX_HEAD_NBYTES:
        raise HeadTooLargeError(f"the headers have more than {MAX_HEAD_NBYTES:,} bytes; send less")
