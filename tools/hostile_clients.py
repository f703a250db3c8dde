"""Attack a server in ways that once took its memory, its connections, its time or its disk.

    python tools/hostile_clients.py [BUNDLE] [--memory 400MB] [--seconds 5] [--files 128]

Starts `stem-edge serve`, which may open FILES files. Prints for each attack: status of the answers, longest
wait for /health, peak of anonymous memory, and size of the log. Exit status 1 if an attack makes /health
take over 0.2 s, memory exceed the limit (of /props), or the log reach 10 kB.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from served import HOST, served

from stem_edge.commands.running.demo import demo_bundle
from stem_edge.system.process_memory import MemoryReader

POST = "POST /{} HTTP/1.1\r\nHost: localhost\r\n"
MOST_SECONDS = 0.2  # for an answer of /health
MOST_LOG = 10_000  # bytes
MOST_WAIT = 60.0  # seconds for an answer


@dataclass(frozen=True)
class Target:
    port: int
    seconds: float  # that idle clients stay

    def connected(self, sent: bytes = b"") -> socket.socket:
        client = socket.create_connection((HOST, self.port), MOST_WAIT)
        with suppress(ConnectionError):  # the server may have refused it already
            client.sendall(sent)
        return client

    def status(self, sent: bytes) -> str:
        with self.connected(sent) as client, suppress(ConnectionError):
            return client.recv(12).decode()[9:] or "closed"
        return "reset"

    def post(self, path: str, body: bytes) -> str:
        head = POST.format(path) + f"Content-Length: {len(body)}\r\n\r\n"
        return self.status(head.encode() + body)


def idle(target: Target) -> Iterator[str]:
    """300 clients send headers and one byte of a body."""
    begun = (POST.format("v1/completions") + "Content-Length: 100\r\n\r\n{").encode()
    with ExitStack() as held:
        clients = [held.enter_context(target.connected(begun)) for _ in range(300)]
        time.sleep(target.seconds)
        yield from (_state(client) for client in clients)


def unread(target: Target) -> Iterator[str]:
    """20 clients ask for a large file 20 times and read nothing."""
    asked = b"GET /vendor/purify.es.mjs HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20
    with ExitStack() as held:
        clients = [held.enter_context(target.connected(asked)) for _ in range(20)]
        time.sleep(target.seconds)
        yield from ("asked" for _ in clients)


def texts(target: Target) -> Iterator[str]:
    """One prompt of 3 MB, then four at once of 65 kB."""
    yield target.post("v1/completions", _prompt("\u0f0b" * (1 << 20)))
    yield from _together(4, lambda: target.post("v1/completions", _prompt("\u0f0b" * 21_800)))


def chunks(target: Target) -> Iterator[str]:
    """A million chunks of one byte."""
    head = POST.format("v1/completions") + "Transfer-Encoding: chunked\r\n\r\n"
    yield target.status(head.encode() + b"1\r\n \r\n" * 1_000_000)


def values(target: Target) -> Iterator[str]:
    """16 MB of empty objects; as many as are allowed; 40 requests at once with half as many."""

    def objects(count: int) -> str:
        return target.post("v1/chat/completions", b'{"messages":[%b{}]}' % (b"{}," * count))

    yield from map(objects, (5_500_000, 65_000))
    yield from _together(40, lambda: objects(32_000))


def grammars(target: Target) -> Iterator[str]:
    """Grammars that become too large during decoding."""
    for regex in ("a{1000000000}", "(?i)(?:abc)*" * 500):
        body = json.dumps({"prompt": "a", "guided_regex": regex})
        yield target.post("v1/completions", body.encode())


ATTACKS = (idle, unread, texts, chunks, values, grammars)


def _prompt(text: str) -> bytes:
    return b'{"prompt":"%b"}' % text.encode()


def _state(client: socket.socket) -> str:
    client.setblocking(False)
    try:
        return client.recv(12).decode()[9:] or "closed"
    except BlockingIOError:
        return "held"
    except ConnectionError:
        return "reset"


def _together(count: int, ask: Callable[[], str]) -> list[str]:
    found = list[str]()
    threads = [threading.Thread(target=lambda: found.append(ask())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def asked(port: int, path: str) -> bytes:
    """GET `path` and return the body of the answer. Raises OSError if the status is not 200."""
    with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=MOST_WAIT) as answer:
        return bytes(answer.read())


def attacked(
    attack: Callable[[Target], Iterator[str]], target: Target, memory: MemoryReader, log: Path
) -> bool:
    """Attack; poll /health and memory every 20 ms; print a line; return True if within limits."""
    ended, waits, peaks = threading.Event(), [0.0], [0]

    def watch() -> None:
        while not ended.wait(0.02):
            began = time.monotonic()
            try:
                asked(target.port, "/health")
                waits.append(time.monotonic() - began)
            except OSError:
                waits.append(MOST_WAIT)
            peaks.append(memory.unevictable())

    limit = int(json.loads(asked(target.port, "/props"))["memory_limit"])
    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    answers = Counter(attack(target))
    time.sleep(0.5)
    ended.set()
    watching.join()
    slowest, most, logged = max(waits), max(peaks), log.stat().st_size
    failed = any(status.startswith("5") and status != "503" for status in answers)
    good = slowest <= MOST_SECONDS and most <= limit and logged < MOST_LOG and not failed
    print(
        f"{(attack.__doc__ or '').rstrip('.')}: "
        + ", ".join(f"{count} x {status}" for status, count in answers.items())
        + f"; /health {slowest:.3f} s; memory {most / 1e6:.0f} MB, then "
        f"{memory.unevictable() / 1e6:.0f}, of {limit / 1e6:.0f}; log {logged:,} bytes: "
        + ("good" if good else "NOT GOOD"),
        flush=True,
    )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", nargs="?", type=Path, default=demo_bundle())
    parser.add_argument("--seconds", type=float, default=5.0, help="that idle clients stay (5)")
    parser.add_argument("--files", type=int, default=128, help="that the server may open (128)")
    parser.add_argument("--memory", help="of the server, as serve takes it")
    args = parser.parse_args()
    options = ["--memory", args.memory] if args.memory else []
    with (
        TemporaryDirectory() as folder,
        Path(folder, "log").open("wb") as log,
        served(args.bundle, *options, files=args.files, log=log) as (port, process_id),
    ):
        target, memory = Target(port, args.seconds), MemoryReader(process_id)
        results = [attacked(one, target, memory, Path(log.name)) for one in ATTACKS]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
