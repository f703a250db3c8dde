"""Who may ask, from where, and how much."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from select import select

import httpx2
import pytest
from servers import client_of, compute_of, listening, wait_for
from starlette.testclient import TestClient

from stem_edge.apps.serving import access, app
from stem_edge.apps.serving.routes.pages import PATHS
from stem_edge.runtime.model import Model

KEY = "secret"


@pytest.fixture
def guarded(model: Model) -> Iterator[TestClient]:
    program = app(model, api_key=KEY, hosts=["model.example"])
    yield client_of(program)
    compute_of(program).end()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": f"Basic {KEY}"}, 401),
        ({"authorization": "Bearer \u00fc"}, 401),
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"authorization": f"bearer {KEY}"}, 200),
    ],
)
def test_key(guarded: TestClient, headers: dict[str, str], status: int) -> None:
    wait_for(lambda: guarded.get("/health").status_code == 200)
    raw = {name: value.encode("latin-1") for name, value in headers.items()}
    assert guarded.get("/props", headers=raw).status_code == status  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/v1/models", "/props", "/v1/chat/completions", "/nope"])
def test_every_other_path_needs_the_key(guarded: TestClient, path: str) -> None:
    error = guarded.get(path).json()["error"]
    assert error["type"] == "authentication_error"
    assert KEY not in error["message"]


@pytest.mark.parametrize("path", ["/health", *list(PATHS)[:3]])
def test_open_paths(guarded: TestClient, path: str) -> None:
    assert guarded.get(path).status_code in (200, 503)


@pytest.mark.parametrize(
    ("host", "fine"),
    [
        ("localhost", True),
        ("localhost:8080", True),
        ("LOCALHOST", True),
        ("127.0.0.1:1", True),
        ("192.168.1.7", True),
        ("[::1]:8080", True),
        ("model.example:80", True),
        ("localhost.:8080", True),
        ("[::1].evil.example", False),
        ("[::1]evil.example:80", False),
        ("localhost:evil.example", False),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost.evil.example", False),
        ("", False),
    ],
)
def test_host(guarded: TestClient, host: str, fine: bool) -> None:
    assert (guarded.get("/health", headers={"host": host}).status_code != 403) is fine


@pytest.mark.parametrize(
    ("origin", "origins", "fine"),
    [
        ("http://localhost", (), True),
        ("http://evil.example", (), False),
        ("evil://localhost", (), False),
        ("null", (), False),
        ("http://[", (), False),
        ("http://localhost:1", (), False),
        ("http://page.example", ("http://page.example",), True),
        ("http://evil.example", ("http://page.example",), False),
        ("http://any.example", ("*",), True),
        ("http://localhost:5173", ("localhost",), True),
        ("https://127.0.0.1:1", ("localhost", "http://page.example"), True),
        ("http://[::1]", ("localhost",), True),
        ("http://localhost.evil.example", ("localhost",), False),
        ("http://127.0.0.1.evil.example:80", ("localhost",), False),
    ],
)
def test_origin(model: Model, origin: str, origins: tuple[str, ...], fine: bool) -> None:
    program = app(model, origins=origins, api_key=KEY)
    client = client_of(program)
    got = client.get("/health", headers={"origin": origin})
    assert (got.status_code != 403) is fine
    allowed = got.headers.get("access-control-allow-origin")
    assert (allowed in (origin, "*")) is bool(fine and origins)
    asking = {"origin": origin, "access-control-request-method": "POST"}
    asking["access-control-request-headers"] = "authorization, content-type"
    preflight = client.options("/v1/chat/completions", headers=asking)
    assert (preflight.status_code == 200) is bool(fine and origins)
    compute_of(program).end()


def test_bodies_have_a_limit(guarded: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "MOST_NBYTES", 1000)
    for content in (b" " * 1001, iter([b" " * 100] * 20)):  # in chunks, without a length
        got = guarded.post(
            "/v1/completions", content=content, headers={"authorization": f"Bearer {KEY}"}
        )
        assert got.status_code == 413
        assert "1,000" in got.json()["error"]["message"]


def test_large_bodies_are_few_at_a_time(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "TOGETHER_NBYTES", 10_000)
    monkeypatch.setattr(access, "SMALL_NBYTES", 8_000)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000\r\n\r\n"
    begun = head + b" " * 8_999
    with listening(app(model)) as port, ExitStack() as held:
        clients = [socket.create_connection(("127.0.0.1", port), 10) for _ in range(2)]
        for client in clients:
            held.enter_context(client).sendall(begun)
        told, _, _ = select(clients, [], [], 10)
        assert b" 429 " in told[0].recv(1 << 16).splitlines()[0]
        small = httpx2.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a"})
        assert small.status_code == 200
