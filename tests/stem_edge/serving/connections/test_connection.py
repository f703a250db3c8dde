"""What one connection may take: requests that are none, clients that stop, leave half or come in crowds."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPResponse

import pytest
from servers import SECONDS, Steps, listening
from starlette.responses import PlainTextResponse

from stem_edge.runtime.model import Model
from stem_edge.serving import app
from stem_edge.serving.connections import turns
from stem_edge.serving.connections.config import Room
from stem_edge.serving.connections.connection import Connection
from stem_edge.serving.connections.turns import Wait

POST = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = b'{"content": "a"}'
SIZED = b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
TEXT = "The capital of France is"
ASKED = {"prompt": TEXT, "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def port(model: Model) -> Iterator[int]:
    with listening(app(model, body_nbytes=1 << 20)) as port:
        yield port


def connected(port: int, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), SECONDS)
    client.sendall(sent)
    return client


def answer(client: socket.socket) -> HTTPResponse:
    response = HTTPResponse(client)
    response.begin()
    return response


def answers(client: socket.socket, count: int) -> bytes:
    """What comes until there are so many answers, all of them fine."""
    data = b""
    while data.count(b"HTTP/1.1 200 OK") < count:
        more = client.recv(1 << 16)
        assert more, data
        data += more
    return data


def error_of(response: HTTPResponse) -> str:
    return str(json.loads(response.read())["error"]["message"])


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (b"nonsense\r\n\r\n", 400, "no request of HTTP/1.1"),
        (POST + b"Host: evil.example\r\n" + SIZED, 400, "several headers Host"),
        (POST + b"Transfer-Encoding: chunked\r\n" + SIZED, 400, "Content-Length"),
        (POST + b"Content-Length: 1\r\n" + SIZED, 400, "Content-Length"),
        (HEALTH.replace(b"\r\n", b"\n"), 400, "no request"),
        (HEALTH[:-2] + b" folded: b\r\n\r\n", 400, "no request"),
        (b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, "no proxy"),
        (HEALTH[:-2] + b"a: " + b"a" * 70_000 + b"\r\n\r\n", 431, "65,536"),
        (b"GET /" + b"a" * 70_000, 431, "65,536"),
        (POST + CHUNKED + b"1\r\n \r\n" * 300_000, 400, "chunks of the body are too small"),
        (POST + CHUNKED + b"nonsense", 400, "no request"),
        (POST + CHUNKED + b"0\r\na: " + b"a" * 1_500_000, 400, "too small"),
    ],
)
def test_errors_of_http_are_json(port: int, sent: bytes, status: int, words: str) -> None:
    with connected(port, sent) as client:
        response = answer(client)
        assert (response.status, response.getheader("connection")) == (status, "close")
        assert words in error_of(response)
        assert client.recv(1) == b""


def test_a_request_that_is_none_does_not_cost_the_answer_to_the_one_before(port: int) -> None:
    with connected(port, HEALTH + b"nonsense\r\n\r\n") as client:
        assert answer(client).status == 200


def test_small_chunks_that_are_not_too_many_are_read(port: int) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY.ljust(9000)) + b"0\r\n\r\n"
    with connected(port, POST + CHUNKED + chunks) as client:
        assert json.loads(answer(client).read())["tokens"]


def test_another_protocol_is_not_taken(port: int) -> None:
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
    before = b"Content-Length: 9000\r\n\r\n" + BODY.ljust(9000)
    with connected(port, POST + before + POST + upgrade + SIZED + HEALTH) as client:
        assert answers(client, 3).count(b'{"tokens":[') == 2
    with connected(port, (HEALTH[:-2] + upgrade + b"\r\n") * 3000) as client:
        answers(client, 3000)


def test_a_slow_but_steady_reader_is_not_cut_off(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes 0.9 MB in the time for 1 KiB: less than frees a place in the system's own buffer."""
    monkeypatch.setattr(turns, "READER", turns.READER._replace(seconds=0.6))
    program, nbytes = app(model), 5 << 20
    program.add_route("/large", lambda _: PlainTextResponse("a" * nbytes))
    asked = HEALTH.replace(b"health", b"large")
    with listening(program) as port, connected(port, asked) as client:
        response = answer(client)
        while more := len(response.read1(15 << 10)):
            nbytes -= more
            time.sleep(0.01)
    assert nbytes == 0


def test_a_head_is_not_as_large_as_the_body_before_it(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, come = Connection.data_received, bytearray()

    def at_once(connection: Connection, data: bytes) -> None:
        come.extend(data)
        if come.endswith((HEALTH[:20], HEALTH[20:])):
            read(connection, bytes(come))
            come.clear()

    monkeypatch.setattr(Connection, "data_received", at_once)
    body = BODY.ljust(100_000)
    sent = b"Content-Length: %d\r\n\r\n%b" % (len(body), body + HEALTH[:20])
    with connected(port, POST + sent) as client:
        assert json.loads(answer(client).read())["tokens"]
        client.sendall(HEALTH[20:])
        assert answer(client).status == 200


@pytest.mark.parametrize(
    ("wait", "sent", "words"),
    [
        ("HEAD", b"GET / HTTP/1.1\r\nHost", "head"),
        ("BODY", POST + b"Content-Length: 100\r\n\r\n{", "body"),
        ("BODY", POST + CHUNKED + b"1\r\n", "body"),
    ],
)
def test_clients_that_stop_are_told(
    port: int, monkeypatch: pytest.MonkeyPatch, wait: str, sent: bytes, words: str
) -> None:
    told: Wait = getattr(turns, wait)
    monkeypatch.setattr(turns, wait, told._replace(seconds=0.05))
    with connected(port, sent) as client:
        response = answer(client)
        assert response.status == 408
        assert words in error_of(response)


def test_connections_without_a_request_are_closed(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "REQUEST", Wait(0.05))
    with connected(port) as client:
        assert client.recv(1) == b""


@pytest.mark.skipif(not turns.LEAVING_IS_SEEN, reason="counts as one that has left")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_who_closes_its_half_is_answered(port: int, model: Model, stream: bool) -> None:
    body = json.dumps(ASKED | {"stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    with connected(port, head % len(body) + body) as client:
        client.shutdown(socket.SHUT_WR)
        said = answer(client).read().decode()
        assert client.recv(1) == b""
    events = [line[6:] for line in said.splitlines() if line.startswith("data: {")] or [said]
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    assert text == model.generate_text(TEXT, max_new_tokens=12)


def test_who_closes_its_half_is_ended_where_leaving_is_not_seen(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "LEAVING_IS_SEEN", False)
    steps = Steps(monkeypatch)
    steps.hold()
    body = json.dumps(ASKED).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    with connected(port, head % len(body) + body) as client:
        client.shutdown(socket.SHUT_WR)
        try:
            assert client.recv(1) == b""
        finally:
            steps.release()


def test_a_late_reader_sees_why_its_body_was_refused(port: int) -> None:
    with connected(port, POST + b"Content-Length: 3000000\r\n\r\n") as client:
        client.sendall(b" " * 3_000_000)
        response = answer(client)
        assert (response.status, response.getheader("connection")) == (413, "close")
        assert "larger than" in error_of(response)


def test_who_waits_makes_room_for_who_asks(model: Model) -> None:
    begun = [HEALTH, b"", HEALTH[:9], POST + b"Content-Length: 100\r\n\r\n{"] * 4
    with ExitStack() as held, listening(app(model), Room(connections=5, backlog=99)) as port:
        idle = list[socket.socket]()
        for sent in begun:
            idle.append(held.enter_context(connected(port, sent)))
            with connected(port, HEALTH) as client:
                assert answer(client).status == 200
        assert answer(idle[0]).status == 200
        for told in idle[1:4]:
            assert "too many connections" in error_of(answer(told))


def test_connections_that_end_make_room(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Connection, "_is_sent", lambda connection: True)  # so they wait for an end
    last = HEALTH[:-2] + b"Connection: close\r\n\r\n"
    with listening(app(model), Room(connections=2, backlog=99)) as port, ExitStack() as held:
        for _ in range(4):
            assert answer(held.enter_context(connected(port, last))).status == 200
