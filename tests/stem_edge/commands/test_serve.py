"""The command stem-edge serve, in a process of its own."""

from __future__ import annotations

import http.client
import json
import os
import re
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

from stem_edge.commands.running.serve import announce, listen, url_of

NAME = socket.gethostname()
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
        assert ask(port, "GET", "/health")[0] == 200  # it says that it is there once it is
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
    with served("--api-key-file", str(key)) as (process, port):
        assert ask(port, "GET", "/v1/models")[0] == 401
        status, models = ask(port, "GET", "/v1/models", authorization="Bearer secret")
        assert (status, json.loads(models)["data"][0]["id"]) == (200, DEMO.name)
        asking = streaming(port, LONG | {"n": 1}, "secret")
        process.send_signal(signal.SIGTERM)
        assert asking.read().endswith(b"data: [DONE]\n\n")
        said = process.communicate(timeout=20)[1]
        assert process.returncode == 0
        assert "listening at" in said and "no chat template" in said


def test_the_memory_that_a_refusal_names_is_enough_and_that_of_fit_with_100_mb_more() -> None:
    def said(command: str, *options: str) -> str:
        words = [sys.executable, "-m", "stem_edge", command, str(DEMO), "--memory", *options]
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        return done.stdout + done.stderr

    refused = said("serve", "60MB", "--port", "0")
    found = re.search(r"at least (\d+ MB) are needed.* requests 83.9 MB", refused)
    planned = re.search(r"--memory (\d+)MB", said("fit", "70MB"))
    assert found is not None and planned is not None, refused
    for memory in found[1], f"{int(planned[1]) + 100}MB":
        with served("--memory", memory):
            pass


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("count", [2, 3])
def test_a_second_signal_tells_those_that_are_left_at_once_and_a_third_nobody(count: int) -> None:
    with served() as (process, port):
        asking = streaming(port, LONG | {"n": 60})
        for pause in (0.2, 0.02, 0)[:count]:
            process.send_signal(signal.SIGTERM)
            time.sleep(pause)
        assert count == 3 or b"the server has ended" in asking.read()[-300:]
        said = process.communicate(timeout=10)[1]
        assert process.returncode in ((0, 128 + signal.SIGTERM) if count == 3 else (0,))
        assert "finishing answers for at most 30 s" in said and "Traceback" not in said


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_signal_ends_a_load() -> None:
    """Also if the tables' server stays silent."""
    command = [sys.executable, "-m", "stem_edge", "serve", str(DEMO), "--port", "0", "--tables"]
    with listen("127.0.0.1", 0) as silent:
        command.append(f"{url_of(silent)}/tables.zarr")
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None and "loading" in process.stderr.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(5) in (0, 128 + signal.SIGINT)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_signals_are_handled_once_the_address_is_printed() -> None:
    code = f"""import os
from stem_edge.commands import main
from stem_edge.commands.running import serve
serve.announce = lambda *_, **__: os.kill(os.getpid(), {signal.SIGINT})
main.main(["serve", {str(DEMO)!r}, "--port", "0"])
raise SystemExit("the server did not handle it")"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert done.returncode == 128 + signal.SIGINT


def streaming(port: int, body: Any, key: str = "") -> http.client.HTTPResponse:
    """Ask for a stream, and return its response once it has begun."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200
    assert response.readline().startswith(b"data: ")
    return response


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "-1"], "--port is -1; expected 0 to 65535"),
        (["--api-key-file", "none"], "none: cannot read (No such file"),
        (["--api-key-file", str(DEMO)], f"{DEMO}: cannot read"),
        (["--api-key-file", os.devnull], f"--api-key-file {os.devnull} has no key"),
        (["--cors-origin", "page.example"], "--cors-origin: 'page.example' is none; give"),
        (["--cors-origin", "https://page.example/"], "https://page.example/"),
        (["--sequences", "0"], "--sequences is 0"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
    ],
)
def test_refused_options(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(DEMO), *options]) == 1
    assert words in capsys.readouterr().err


# Address to listen at, whether there is a key and a name for others, and what is said of it.
@pytest.mark.parametrize(
    ("host", "key", "names", "address", "said"),
    [
        ("127.0.0.1", False, False, "127.0.0.1", []),
        ("0.0.0.0", False, False, "127.0.0.1", ["--api-key-file", f"--allow-host {NAME}"]),
        ("0.0.0.0", True, False, "127.0.0.1", [f"--allow-host {NAME}"]),
        ("::1", False, False, "[::1]", []),
        ("::", False, True, "[::1]", ["--api-key-file"]),
    ],
)
def test_addresses_that_can_be_opened(
    host: str,
    key: bool,
    names: bool,
    address: str,
    said: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    if ":" in host and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6")
    with listen(host, 0) as listening:
        url = url_of(listening)
        announce(listening, url, has_key=key, has_names=names)
        port = listening.getsockname()[1]
        assert url == f"http://{address}:{port}"
        socket.create_connection((address.strip("[]"), port)).close()
    first, *notes = capsys.readouterr().err.splitlines()
    assert url in first
    assert all(words in note for words, note in zip(said, notes, strict=True))
