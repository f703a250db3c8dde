"""A server in a thread of the tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp


@contextmanager
def serving(program: ASGIApp) -> Iterator[str]:
    """Serve a program at a free port; yield its address, without a path."""
    server = uvicorn.Server(uvicorn.Config(program, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run, name="server of a test")
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server ended before it started"
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
