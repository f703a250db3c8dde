"""The command stem-edge serve, in a process of its own."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from installed import DEMO

from stem_edge.commands.main import main

pytest.importorskip("uvicorn")
LONG = {
    "prompt": "Once upon a time",
    "max_tokens": 240,
    "stream": True,
    "grammar": 'root ::= ("a " | "b ")+',
    "n": 4,
}


@contextmanager
def served(*options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run the command; yield its process and port."""
    command = [sys.executable, "-m", "stem_edge", "serve", str(DEMO), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = int(line.partition("http://127.0.0.1:")[2].partition("/")[0])
        while ask(port, "GET", "/health")[0] != 200:
            time.sleep(0.05)
        yield process, port
    finally:
        process.kill()
        process.communicate()


def ask(port: int, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
    """Return status and body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, None if body is None else json.dumps(body), headers)
    response = connection.getresponse()
    return response.status, response.read()


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_answers_are_finished_at_the_end(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    with served("--api-key-file", str(key), "--name", "it") as (process, port):
        assert ask(port, "GET", "/v1/models")[0] == 401
        status, models = ask(port, "GET", "/v1/models", authorization="Bearer secret")
        assert (status, json.loads(models)["data"][0]["id"]) == (200, "it")
        asking = streaming(port, LONG, "secret")
        process.send_signal(signal.SIGTERM)
        assert asking.read().endswith(b"data: [DONE]\n\n")
        assert process.wait(20) == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_the_rest_is_told_after_the_grace() -> None:
    with served("--grace", "0") as (process, port):
        asking = streaming(port, LONG)
        process.send_signal(signal.SIGINT)
        assert b"the server has ended" in asking.read()[-300:]
        assert process.wait(20) == 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_second_signal_ends_at_once() -> None:
    with served("--grace", "600") as (process, port):
        asking = streaming(port, LONG | {"n": 60})
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        asking.close()


def streaming(port: int, body: Any, key: str = "") -> http.client.HTTPResponse:
    """Ask for a stream, and return its response once it has begun."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"x-api-key": key} if key else {}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline().startswith(b"data: ")
    return response


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", str(DEMO), "--port", port]) == 1
    error = capsys.readouterr().err
    assert f"cannot listen on port {port} of 127.0.0.1 (Address already in use)" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--api-key", "a", "--api-key-file", "b"], "not both"),
        (["--api-key", ""], "--api-key has no key"),
        (["--port", "99999"], "port 99999"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
    ],
)
def test_refused_options(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(DEMO), *options]) == 1
    assert words in capsys.readouterr().err


def test_no_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert "no" in captured.err
    assert captured.out == ""
