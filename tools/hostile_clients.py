"""Attack a server in ways that once took its memory, its connections, its time or its disk.

    python tools/hostile_clients.py [BUNDLE] [--memory 400MB] [--seconds 5] [--files 128] [--json]

Starts `stem-edge serve` with so few open files, and says of each attack how it was answered, how long
/health took at most meanwhile, the most anonymous memory, and the size of the log. Exit status 1 if
/health takes over 0.2 s, memory exceeds the plan (of /props), or the log has 10 kB or more.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from served import HOST, served

from stem_edge.commands.running.demo import demo_bundle
from stem_edge.system.process_memory import MemoryReader

POST = "POST /{} HTTP/1.1\r\nHost: localhost\r\n"
MOST_SECONDS = 0.2  # of /health
MOST_LOG = 10_000  # bytes
MOST_WAIT = 60.0  # seconds for an answer


@dataclass(frozen=True)
class Target:
    """A server under attack."""

    port: int
    seconds: float  # that idle clients stay

    def connected(self, sent: bytes = b"") -> socket.socket:
        """Return a connection that has sent something."""
        client = socket.create_connection((HOST, self.port), MOST_WAIT)
        with suppress(ConnectionError):  # the server may have refused it already
            client.sendall(sent)
        return client

    def status(self, sent: bytes) -> str:
        """Return the status of the answer to a request."""
        with self.connected(sent) as client, suppress(ConnectionError):
            return client.recv(12).decode()[9:] or "closed"
        return "reset"

    def post(self, path: str, body: bytes) -> str:
        """Return the status of the answer to a request with JSON."""
        return self.status(request(path, body))


def request(path: str, body: bytes) -> bytes:
    """Return a request with a body."""
    return (POST.format(path) + f"Content-Length: {len(body)}\r\n\r\n").encode() + body


def idle(target: Target) -> Iterator[str]:
    """300 clients send a head and one byte of a body."""
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
    """3 MB of a prompt, then 65 kB, four at a time."""
    yield target.post("v1/completions", _prompt("\u0f0b" * (1 << 20)))
    yield from _together(4, lambda: target.post("v1/completions", _prompt("\u0f0b" * 21_800)))


def chunks(target: Target) -> Iterator[str]:
    """A million chunks of one byte."""
    head = POST.format("v1/completions") + "Transfer-Encoding: chunked\r\n\r\n"
    yield target.status(head.encode() + b"1\r\n \r\n" * 1_000_000)


def values(target: Target) -> Iterator[str]:
    """16 MB of empty objects, as many as are allowed, and 40 together with half as many."""

    def asked(count: int) -> str:
        return target.post("v1/chat/completions", b'{"messages":[%b{}]}' % (b"{}," * count))

    yield from map(asked, (5_500_000, 65_000))
    yield from _together(40, lambda: asked(32_000))


def grammars(target: Target) -> Iterator[str]:
    """Grammars that become too large while they are used."""
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


class Watch(threading.Thread):
    """Asks for /health, and reads memory, every 20 ms until `end`."""

    def __init__(self, port: int, process_id: int) -> None:
        super().__init__(daemon=True)
        self._port, self._reader = port, MemoryReader(process_id)
        self._ended = threading.Event()
        self.slowest, self.most = 0.0, 0

    def run(self) -> None:
        """Measure, on a new connection each time."""
        while not self._ended.wait(0.02):
            began = time.monotonic()
            try:
                status = ask(self._port, "/health")[0]
            except OSError:
                status = 0
            self.slowest = max(
                self.slowest, time.monotonic() - began if status == 200 else MOST_WAIT
            )
            self.most = max(self.most, self._reader.unevictable())

    def end(self) -> None:
        """Stop."""
        self._ended.set()
        self.join()


@dataclass(frozen=True)
class Outcome:
    """What an attack did."""

    attack: str
    answers: dict[str, int]  # by status
    health_seconds: float
    memory: int
    memory_after: int
    limit: int
    log: int

    @property
    def good(self) -> bool:
        """Tell whether the server was there, within its plan, and quiet."""
        return (
            self.health_seconds <= MOST_SECONDS
            and self.memory <= self.limit
            and self.log < MOST_LOG
            and not any(status.startswith("5") and status != "503" for status in self.answers)
        )

    def line(self) -> str:
        """Return a report of one line."""
        answers = ", ".join(f"{count} x {status}" for status, count in self.answers.items())
        return (
            f"{self.attack}: {answers}; /health {self.health_seconds:.3f} s; memory {self.memory / 1e6:.0f} "
            f"MB, then {self.memory_after / 1e6:.0f}, of {self.limit / 1e6:.0f}; log {self.log:,} bytes: "
            + ("good" if self.good else "NOT GOOD")
        )


def ask(port: int, path: str) -> tuple[int, bytes]:
    """Return status and body of an answer."""
    connection = http.client.HTTPConnection(HOST, port, timeout=MOST_WAIT)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def attacked(
    attack: Callable[[Target], Iterator[str]],
    target: Target,
    process_id: int,
    limit: int,
    log: Path,
) -> Outcome:
    """Attack once."""
    watch = Watch(target.port, process_id)
    watch.start()
    answers = Counter(attack(target))
    time.sleep(0.5)
    watch.end()
    after = MemoryReader(process_id).unevictable()
    name = (attack.__doc__ or "").rstrip(".")
    return Outcome(name, dict(answers), watch.slowest, watch.most, after, limit, log.stat().st_size)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", nargs="?", type=Path, default=demo_bundle())
    parser.add_argument("--seconds", type=float, default=5.0, help="that idle clients stay (5)")
    parser.add_argument("--files", type=int, default=128, help="that the server may open (128)")
    parser.add_argument("--memory", help="of the server, as serve takes it")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    outcomes = list[Outcome]()
    options = ["--memory", args.memory] if args.memory else []
    with TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with (
            log.open("wb") as output,
            served(args.bundle, *options, files=args.files, log=output) as (port, process_id),
        ):
            limit = int(json.loads(ask(port, "/props")[1])["memory_limit"])
            target = Target(port, args.seconds)
            for attack in ATTACKS:
                outcomes.append(attacked(attack, target, process_id, limit, log))
                print(json.dumps(asdict(outcomes[-1])) if args.json else outcomes[-1].line())
    return 0 if all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
