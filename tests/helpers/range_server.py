"""A web server on this machine that serves files in ranges, slowly and with faults if asked to."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

Fault = Literal["500", "403", "416", "loop", "cut", "reset", "wrong", "hang", "no ranges"]
STATUS = {"500": 500, "403": 403, "416": 416, "loop": 307}  # which leads to the same address
PIECE_NBYTES = 16 << 10  # sent between two looks at the clock


@dataclass
class RangeServer:
    """What is served, and how. Faults are by request: called with its number and path, from 0 on."""

    root: Path
    latency: float = 0.0  # seconds from a request to the first byte
    bandwidth: float = float("inf")  # bytes a second of all connections together
    fault: Callable[[int, str], Fault | None] = lambda number, path: None
    url: str = ""
    requests: list[tuple[str, int]] = field(default_factory=list)  # path, bytes of the answer
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)
    free_at: float = 0.0  # when the line will have sent all that was given to it

    def pass_line(self, nbytes: int) -> None:
        """Wait until the line would have sent these bytes; all connections share it."""
        with self.lock:
            self.free_at = max(self.free_at, time.perf_counter()) + nbytes / self.bandwidth
            until = self.free_at
        # Sleeping takes longer than asked, so short waits are left to the next piece.
        if (rest := until - time.perf_counter()) > 0.001:
            time.sleep(rest)


@contextmanager
def serving(
    root: Path, latency: float = 0.0, bandwidth: float = float("inf")
) -> Iterator[RangeServer]:
    """Serve a folder until the block ends."""
    state = RangeServer(root, latency, bandwidth)

    class Handler(_Handler):
        server_state = state

    with _Server(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield state
        finally:
            state.ended.set()
            server.shutdown()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # connections that are opened at the same time


class _Handler(BaseHTTPRequestHandler):
    server_state: RangeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""

    def do_GET(self) -> None:
        state = self.server_state
        with state.lock:
            fault = state.fault(len(state.requests), self.path)
            at = len(state.requests)
            state.requests.append((self.path, 0))
        time.sleep(state.latency)
        if fault == "hang":
            state.ended.wait(60)
        path = state.root / self.path.lstrip("/")
        if fault in STATUS or not path.is_file():
            self.send_response(STATUS.get(str(fault), 404))
            self.send_header("Content-Length", "0")
            self.send_header("Location", self.path)
            self.end_headers()
            return
        body = self._body(path, ranges=fault != "no ranges")
        if fault == "wrong":
            body = bytes([body[0] ^ 1]) + body[1:]
        self.end_headers()
        cut = fault in ("cut", "reset")
        state.requests[at] = (self.path, len(body))  # before a client can have it all
        self._send(body[: len(body) // 2] if cut else body)
        if fault == "reset":  # what was sent and not read is lost
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = self.close_connection or cut

    def _body(self, path: Path, *, ranges: bool) -> bytes:
        """Send the status, and return the bytes that are asked for."""
        whole, asked = path.stat().st_size, self.headers.get("Range", "")
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", asked) if ranges else None
        first, last = (int(found[1]), min(int(found[2]), whole - 1)) if found else (0, whole - 1)
        if first > last:
            self.send_response(416)
            self.send_header("Content-Length", "0")
            return b""
        self.send_response(206 if found else 200)
        self.send_header("Content-Length", str(last + 1 - first))
        with path.open("rb") as file:
            file.seek(first)
            return file.read(last + 1 - first)

    def _send(self, body: bytes) -> None:
        for at in range(0, len(body), PIECE_NBYTES):
            piece = body[at : at + PIECE_NBYTES]
            self.server_state.pass_line(len(piece))
            self.wfile.write(piece)
