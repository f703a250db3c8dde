"""Send a server thousands of requests, disconnect in every way, and check answers and resources.

    python tools/soak.py [BUNDLE] --minutes 60
    python tools/soak.py BUNDLE --requests 2000

Starts `stem-edge serve --exact`, so that an answer does not depend on other requests. Requests use both
OpenAI interfaces, streamed or not, greedy or sampled, with stop texts, schemas and conversations. In a third
of them, the client disconnects before or during the answer. Some clients read slowly, and some send invalid
requests. Every complete answer must equal the answer of the model in this process. Exit status 1 if an answer
differs, if memory certainly grows by 2 MiB or more per 10,000 requests, or if the second half of the requests
has more threads or open files than the first half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil
from growth import Sample, growth
from served import HOST, served

import stem_edge
from stem_edge.commands.running.demo import demo_bundle
from stem_edge.runtime import Model
from stem_edge.system.process_memory import MemoryReader

CASES = 48  # different requests, whose answers are known
TURNS = 4  # of each conversation; one conversation for each case with a schema
CLIENTS = 12  # at a time
BETWEEN_SAMPLES = 10  # requests of each client
MAX_SLOPE = 2 << 20  # bytes per 10,000 requests
SECONDS = 120.0  # for an answer
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 9}},
    "required": ["n"],
}
BROKEN = (
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 3\r\n\r\n{}}",
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: elsewhere.example\r\n\r\n",
    b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9,
    b"\r\n" * 100,
)


@dataclass(frozen=True)
class Case:
    """A request and its right answer. then: the conversation's next request, if any."""

    path: str
    body: dict[str, Any]
    text: str
    then: Case | None = None


def cases(model: Model, count: int) -> list[Case]:
    """Make `count` requests, and conversations, with the answers of the model in this process."""
    rng = np.random.default_rng(0)
    found = list[Case]()
    for number in range(count):
        prompt = rng.integers(0, model.config.vocab_size, int(rng.integers(1, 24))).tolist()
        options: dict[str, Any] = {"temperature": 0, "seed": number}
        if number % 3 == 1:
            options |= {"temperature": 0.8, "top_p": 0.9}
        if number % 5 == 2:
            options |= {"stop": ["e", "\n\n"]}
        tokens = int(rng.integers(1, 33))
        schema = SCHEMA if number % 8 == 7 else None
        given: dict[str, Any] = {"schema": schema} if schema else {}
        text = model.generate_text(prompt, max_new_tokens=tokens, **options, **given)
        body = {"prompt": prompt, "max_tokens": tokens, **options}
        if schema:
            form = {"name": "n", "schema": schema}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
            found.append(conversation(model, tokens, options))
        found.append(Case("/v1/completions", body, text))
    return found


def conversation(model: Model, tokens: int, options: dict[str, Any]) -> Case:
    """Hold a conversation in this process, to know the right answers; return its first turn."""
    turns = list[Case]()
    with model.conversation() as talk:
        for number in range(TURNS):
            asked = f"What is {number} and {options['seed']}?"
            text = "".join(
                chunk.text for chunk in talk.send(asked, max_new_tokens=tokens, **options)
            )
            body = {"messages": talk.messages[:-1], "max_tokens": tokens, **options}
            turns.append(Case("/v1/chat/completions", body, text))
    return reduce(lambda then, turn: replace(turn, then=then), reversed(turns))


class Client:
    """Sends one request after the other, and counts how they end."""

    def __init__(self, port: int, known: list[Case], seed: int, counts: Counter[str]) -> None:
        self._known, self._counts = known, counts
        self._url = f"http://{HOST}:{port}"
        self._rng = np.random.default_rng(seed)
        self._next: Case | None = None  # next request of a conversation

    async def ask_some(self) -> None:
        for _ in range(BETWEEN_SAMPLES):
            await self.ask()

    async def ask(self) -> None:
        """Send a request; at random, read the answer, disconnect, read slowly, or send nonsense."""
        ways = ["whole", "leave", "slow", "broken"]
        way = str(self._rng.choice(ways, p=[0.65, 0.3, 0.03, 0.02]))
        try:
            async with asyncio.timeout(SECONDS):
                if way == "broken":
                    await self._broken()
                    found = "refused"
                else:
                    found = await self._answered(way)
            self._counts[found] += 1
        except (OSError, TimeoutError, httpx2.TransportError) as error:
            self._counts[f"{way}: {type(error).__name__}"] += 1

    async def _answered(self, way: str) -> str:
        case = self._next or self._known[int(self._rng.integers(len(self._known)))]
        self._next = case.then
        stream = bool(self._rng.integers(2))
        body = case.body | {"stream": stream}
        async with httpx2.AsyncClient(base_url=self._url, timeout=SECONDS) as client:
            if way == "leave":  # before or during the answer
                with suppress(TimeoutError):
                    async with asyncio.timeout(float(self._rng.exponential(0.05))):
                        await client.post(case.path, json=body)
                return "left"
            data = b""
            async with client.stream("POST", case.path, json=body) as response:
                async for piece in response.aiter_bytes(64 if way == "slow" else None):
                    data += piece
                    await asyncio.sleep(0.01 * (way == "slow"))
        return "right" if response.is_success and _text(data, stream) == case.text else "WRONG"

    async def _broken(self) -> None:
        reader, writer = await asyncio.open_connection(HOST, httpx2.URL(self._url).port)
        writer.write(BROKEN[int(self._rng.integers(len(BROKEN)))])
        with suppress(ConnectionError, TimeoutError):
            await writer.drain()
            await asyncio.wait_for(reader.read(100), 0.2)
        writer.close()


def _text(data: bytes, stream: bool) -> str:
    events = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: {")]
    choices = [json.loads(event)["choices"] for event in (events if stream else [data])]
    return "".join(_piece(one[0]) for one in choices if one)


def _piece(choice: dict[str, Any]) -> str:
    message = choice.get("message") or choice.get("delta") or {}
    return str(choice.get("text") or message.get("content") or "")


async def soak(
    port: int, server: psutil.Process, known: list[Case], requests: float, minutes: float
) -> bool:
    """Send requests from CLIENTS clients at once until `requests` or `minutes` is reached.

    Print how they ended, and return True if all complete answers are right, and no resource certainly grows.
    """
    counts, samples, started = Counter[str](), list[Sample](), time.monotonic()
    clients = [Client(port, known, number, counts) for number in range(CLIENTS)]
    seconds = 0.0
    while counts.total() < requests and seconds < 60 * minutes:
        await asyncio.gather(*(client.ask_some() for client in clients))
        await asyncio.sleep(0.3)  # until connections are closed
        seconds = time.monotonic() - started
        samples.append(_sample(server, counts.total(), seconds))
    grown, last = growth(samples), samples[-1]
    good = set(counts) <= {"right", "left", "refused"} and grown.flat(MAX_SLOPE)
    ends = ", ".join(f"{count:,} {end}" for end, count in sorted(counts.items()))
    print(f"{last.done:,} requests in {last.seconds:.0f} s: {ends}; {grown.line(last)}: ", end="")
    print("good" if good else "NOT GOOD")
    return good


def _sample(server: psutil.Process, requests: int, seconds: float) -> Sample:
    memory = MemoryReader(server.pid).unevictable()
    return Sample(requests, seconds, memory, server.num_threads(), server.num_fds())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", nargs="?", type=Path, default=demo_bundle())
    parser.add_argument("--requests", type=int, help="ask so often, instead of --minutes")
    parser.add_argument("--minutes", type=float, default=60.0)
    args = parser.parse_args(arguments)
    with stem_edge.load(args.bundle, threads=1, exact=True) as model:
        known = cases(model, CASES)
    infinite = float("inf")
    limits = (args.requests, infinite) if args.requests else (infinite, args.minutes)
    with served(args.bundle, *["--exact", "--sequences", "8", "--threads", "1"]) as (port, pid):
        good = asyncio.run(soak(port, psutil.Process(pid), known, *limits))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
