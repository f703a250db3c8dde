"""What a connection may take: requests that are none, clients that stop, leave or come in crowds."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPResponse

import pytest
from servers import SECONDS, listening
from starlette.responses import PlainTextResponse

from stem_edge.apps.serving import app, connections
from stem_edge.runtime.model import Model

POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = b'{"prompt": "a" }'
SIZED = b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def port(model: Model) -> Iterator[int]:
    with listening(app(model)) as port:
        yield port


def connected(port: int, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), SECONDS)
    client.sendall(sent)
    return client


def answer(client: socket.socket) -> HTTPResponse:
    response = HTTPResponse(client)
    response.begin()
    return response


def closed(client: socket.socket) -> bool:
    """Tell whether the server closes a connection without an answer."""
    try:
        return client.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (b"nonsense\r\n\r\n", 400, "Invalid HTTP"),
        (b"\0" * 99, 400, "Invalid HTTP"),
        (POST + b"Host: evil.example\r\n" + SIZED, 400, "Invalid HTTP"),
        (
            POST + b"Content-Length: 16\r\n" + CHUNKED + b"10\r\n%b\r\n0\r\n\r\n" % BODY,
            400,
            "beside",
        ),
        (POST + b"Content-Length: 1\r\n" + SIZED, 400, "Invalid HTTP"),
        (b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\n", 404, "no localhost"),
        (POST + CHUNKED + b"nonsense\r\n", 400, "Invalid HTTP"),
    ],
)
def test_what_is_no_request_is_refused(port: int, sent: bytes, status: int, words: str) -> None:
    with connected(port, sent) as client:
        response = answer(client)
        assert response.status == status
        assert words in response.read().decode()


@pytest.mark.parametrize("sent", [HEALTH[:-2] + b"a: ", b"GET /"])
def test_a_head_has_a_limit(port: int, sent: bytes) -> None:
    with connected(port, sent + b"a" * (connections.MAX_HEAD_NBYTES - 100)) as client:
        client.sendall(b"a" * 200)
        assert answer(client).status == 400


def test_a_slow_but_steady_reader_is_not_cut_off(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "WAIT_SECONDS", 0.6)
    program, nbytes = app(model), 5 << 20
    program.add_route("/large", lambda _: PlainTextResponse("a" * nbytes))
    with listening(program) as port, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        client.connect(("127.0.0.1", port))
        client.sendall(HEALTH.replace(b"health", b"large"))
        response = answer(client)
        while more := len(response.read1(30 << 10)):
            nbytes -= more
            time.sleep(0.01)
    assert nbytes == 0


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost",
        POST + b"Content-Length: 100\r\n\r\n{",
        POST + CHUNKED + b"1\r\n",
    ],
    ids=["nothing", "a head", "a body", "a chunk"],
)
def test_clients_that_stop_are_closed(
    port: int, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connections, "WAIT_SECONDS", 0.05)
    with connected(port, sent) as client:
        assert closed(client)


def test_chunks_that_are_too_small_close_the_connection(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_FRAMING_NBYTES", 1 << 14)
    with connected(port, POST + CHUNKED) as client:
        with suppress(ConnectionError):
            client.sendall(b"1\r\n \r\n" * 4000)
        assert closed(client)


def test_a_client_that_still_sends_sees_why_its_body_was_refused(port: int) -> None:
    with connected(port, POST + b"Content-Length: 5000000\r\n\r\n") as client:
        client.sendall(b" " * 5_000_000)
        response = answer(client)
        assert response.status == 413
        assert "larger than" in response.read().decode()
