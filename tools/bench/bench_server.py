"""Compare answers over HTTP with those in process: tokens a second, and time to the first token.

    python tools/bench/bench_server.py BUNDLE --text ids.int32 --rounds 5
    python tools/bench/bench_server.py BUNDLE --text ids.int32 --json

One process loads the bundle once, answers in process, and serves the same model on loopback to a client in
another process, in turns. Each prompt is another piece of the text, and none is kept. Times are the
client's: from before it sends the request to the events that have text.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np
import uvicorn

from stem_edge.runtime import Model
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.loading import load_with
from stem_edge.serving import app

HOST = "127.0.0.1"
SECONDS = 600.0

Asked = TypeVar("Asked")
Found = TypeVar("Found")


class Answered(NamedTuple):
    """Times of an answer, in seconds since it was asked for."""

    first: float
    last: float
    tokens: int

    @property
    def rate(self) -> float:
        """Tokens a second after the first."""
        return (self.tokens - 1) / (self.last - self.first)


def in_process(model: Model, prompt: list[int], tokens: int) -> Answered:
    """Answer a prompt by Model.generate."""
    started, times, count = time.perf_counter(), list[float](), 0
    for chunk in model.generate(prompt, max_new_tokens=tokens):
        times.append(time.perf_counter() - started)
        count += len(chunk.token_ids)
    return Answered(times[0], times[-1], count)


def over_http(port: int, prompt: list[int], tokens: int) -> Answered:
    """Answer a prompt by the server."""
    body = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(HOST, port, timeout=SECONDS)
    started, times, count = time.perf_counter(), list[float](), 0
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    for line in connection.getresponse():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("usage"):
            count = event["usage"]["completion_tokens"]
        if event["choices"]:
            times.append(time.perf_counter() - started)
    connection.close()
    return Answered(times[0], times[-1], count)


def together_over_http(port: int, prompts: Sequence[list[int]], tokens: int) -> float:
    """Return tokens a second of answers asked for at once, prompts included."""
    started = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: over_http(port, prompt, tokens), prompts))
    return sum(answer.tokens for answer in answers) / (time.perf_counter() - started)


def together_in_process(model: Model, prompts: Sequence[list[int]], tokens: int) -> float:
    """Return tokens a second of Model.generate_many, prompts included."""
    started, count = time.perf_counter(), 0
    for _, chunk in model.generate_many(prompts, sequences=len(prompts), max_new_tokens=tokens):
        count += len(chunk.token_ids)
    return count / (time.perf_counter() - started)


@contextmanager
def served(model: Model, sequences: int) -> Iterator[int]:
    """Serve a model in a thread; yield the port."""
    with socket.create_server((HOST, 0)) as listening:
        config = uvicorn.Config(app(model, sequences=sequences), log_level="warning", lifespan="on")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


class Round(NamedTuple):
    """Ratios of the server to in process, of one round, and what they are made of."""

    rate: float
    server_rate: float
    first_ms: float
    server_first_ms: float
    together: float
    server_together: float


def measured(
    model: Model, ids: list[int], *, rounds: int, streams: int, prompt: int, tokens: int
) -> list[Round]:
    """Measure in turns, each first in every other round.

    Each prompt is answered once before, not counted, so that whoever comes first does not read its rows
    for the other.
    """
    rng, found = np.random.default_rng(0), list[Round]()

    def prompts(count: int) -> list[list[int]]:
        starts = rng.integers(0, len(ids) - prompt, count).tolist()
        return [ids[start : start + prompt] for start in starts]

    with (
        served(model, streams) as port,
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as client,
    ):

        def server(one: list[int]) -> Answered:
            return client.submit(over_http, port, one, tokens).result()

        def server_together(many: Sequence[list[int]]) -> float:
            return client.submit(together_over_http, port, many, tokens).result()

        def here(one: list[int]) -> Answered:
            return in_process(model, one, tokens)

        def here_together(many: Sequence[list[int]]) -> float:
            return together_in_process(model, many, tokens)

        for number in range(rounds):
            one, many = prompts(1)[0], prompts(streams)
            asked, plain = _in_turns(server, here, one, number)
            asked_together, together = _in_turns(server_together, here_together, many, number)
            figures = plain.rate, asked.rate, plain.first * 1e3, asked.first * 1e3
            found.append(Round(*figures, together, asked_together))
    return found


def _in_turns(
    first: Callable[[Asked], Found], second: Callable[[Asked], Found], given: Asked, number: int
) -> tuple[Found, Found]:
    """Return what two functions give; both run once before, and in odd rounds the second comes first."""
    first(given)
    second(given)
    if number % 2:
        found = second(given)
        return first(given), found
    return first(given), second(given)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="token ids, int32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--slots", type=int, help="row cache slots (as many as fit)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    ids = np.fromfile(args.text, "<i4").tolist()
    options = LoadOptions(slots=args.slots, keep_prefixes=False)
    with load_with(args.bundle, options) as model:
        rounds = measured(
            model,
            ids,
            rounds=args.rounds,
            streams=args.streams,
            prompt=args.prompt_tokens,
            tokens=args.new_tokens,
        )
    if args.json:
        print(json.dumps([one._asdict() for one in rounds]))
        return 0
    rates, later, together = zip(
        *[
            (
                one.server_rate / one.rate,
                one.server_first_ms - one.first_ms,
                one.server_together / one.together,
            )
            for one in rounds
        ],
        strict=True,
    )
    print(
        f"tok/s, one stream: {median(r.rate for r in rounds):.1f} in process; {_spread(rates)} of it"
    )
    print(
        f"first token: {median(r.first_ms for r in rounds):.0f} ms in process; later by ms: {_spread(later)}"
    )
    print(
        f"tok/s, {args.streams} streams: {median(r.together for r in rounds):.1f} in process; "
        f"{_spread(together)} of it"
    )
    return 0


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    sys.exit(main())
