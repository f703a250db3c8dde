"""Servers of the demo model: in a thread of their own, and held at each step."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from stem_edge import Model
from stem_edge.apps.serving.compute import Compute
from stem_edge.apps.serving.connections import Server

SECONDS = 30.0
THREAD = "server of a test"  # which runs its event loop


def client_of(program: Starlette) -> TestClient:
    """Return a client that asks by a name which the server has."""
    return TestClient(program, base_url="http://localhost", raise_server_exceptions=False)


def compute_of(program: Starlette) -> Compute:
    """Return the compute thread of a server."""
    compute: Compute = program.state.service.compute
    return compute


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it has not come true"
        time.sleep(0.005)


@contextlib.contextmanager
def listening(program: Starlette, most: int | None = None) -> Iterator[int]:
    """Serve over a socket, from a thread of its own; yield the port."""
    server = Server(program, most)
    with socket.create_server(("127.0.0.1", 0)) as bound:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name=THREAD)
        thread.start()
        try:
            wait_for(lambda: server.started)
            wait_for(lambda: compute_of(program).loaded is not None)
            yield bound.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(SECONDS)
    assert not thread.is_alive()


@contextlib.contextmanager
def serving(program: Starlette) -> Iterator[str]:
    """Serve like `listening`; yield the address, without a path."""
    with listening(program) as port:
        yield f"http://127.0.0.1:{port}"


class Connection:
    """A connection of a client that sends a request and may leave at any time."""

    def __init__(self, port: int, path: str, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        self._socket = socket.create_connection(("127.0.0.1", port), SECONDS)
        self._socket.sendall(head.encode() + data)
        self.got = b""

    def read_until(self, text: bytes) -> None:
        """Read until a text has come."""
        while text not in self.got:
            more = self._socket.recv(1 << 16)
            assert more, self.got
            self.got += more

    def read_all(self) -> bytes:
        """Read until the server ends the connection, or an answer."""
        while not self.got.endswith((b"0\r\n\r\n", b"}")):
            if not (more := self._socket.recv(1 << 16)):
                break
            self.got += more
        return self.got

    def leave(self) -> None:
        """Close the connection."""
        self._socket.close()


class Watched:
    """A scheduler that calls `before` before each of its steps."""

    def __init__(self, scheduler: Any, before: Callable[[], object]) -> None:
        self._scheduler, self._before = scheduler, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def step(self) -> Any:
        self._before()
        return self._scheduler.step()


def before_steps(patch: pytest.MonkeyPatch, model: Model, before: Callable[[], object]) -> None:
    """Call `before` before each step of schedulers that a model makes from now on."""
    make = model.scheduler
    patch.setattr(
        model, "scheduler", lambda *given, **named: Watched(make(*given, **named), before)
    )


class Steps:
    """Holds the schedulers of a model before each step once `hold` was called, and counts steps."""

    def __init__(self, patch: pytest.MonkeyPatch, model: Model) -> None:
        self.done = 0
        self._free, self._allowed = threading.Event(), threading.Semaphore(0)
        self.waiting = threading.Event()  # set while a step is held
        self._free.set()
        before_steps(patch, model, self._held)

    def _held(self) -> None:
        self.done += 1
        if not self._free.is_set():
            self.waiting.set()
            self._allowed.acquire()
            self.waiting.clear()

    def hold(self) -> None:
        """Let no step begin from now on."""
        self._free.clear()

    def allow(self, steps: int) -> None:
        """Let some steps be done, and wait until the next one is held."""
        for _ in range(steps):
            assert self.waiting.wait(SECONDS)
            self.waiting.clear()
            self._allowed.release()
        assert self.waiting.wait(SECONDS)

    def release(self) -> None:
        """Let all steps begin."""
        self._free.set()
        self._allowed.release()
