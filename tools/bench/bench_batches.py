"""Compare a batch on Ray with one in process: rows a second once both run, and what starting takes.

    python tools/bench/bench_batches.py stem_edge/demo_model --rounds 6
    python tools/bench/bench_batches.py BUNDLE --rows 500 --new-tokens 64 --json

Both answer the same prompts in turns, each first in every other round, Ray with this machine as its only
node. The first and the last results, while a machine starts or ends, are left out of the rates.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

import stem_edge
from stem_edge.batches.batch import split
from stem_edge.batches.results import Result
from stem_edge.batches.rows import Row, named
from stem_edge.batches.run import answer
from stem_edge.batches.settings import Answers, Settings
from stem_edge.runtime.backends.keywords import LoadKeywords

ENDS = 0.05  # of the results, at either end


class Run(NamedTuple):
    """Rows a second in the middle of a batch, and the seconds that it took from loading to closing."""

    rate: float
    seconds: float


def rows_of(count: int) -> list[Row]:
    """Return prompts that differ, so that no prefix of one serves the others."""
    texts = (f"{number} ways to say what the capital of a country is:" for number in range(count))
    lines = (json.dumps({"prompt": text}).encode() for text in texts)
    return [named(data, line) for line, data in enumerate(lines, 1)]


def timed(answers: Answers, rows: Sequence[Row]) -> Run:
    """Answer rows; raise RuntimeError if one fails."""
    started, times = time.perf_counter(), list[float]()
    for result in answers(rows):
        if result.failed:
            raise RuntimeError(result.why)
        times.append(time.perf_counter())
    left = int(ENDS * len(times))
    rate = (len(times) - 2 * left - 1) / (times[-1 - left] - times[left])
    return Run(rate, time.perf_counter() - started)


def here(bundle: str, loading: LoadKeywords, settings: Settings) -> Answers:
    """Return what loads the bundle in this process and answers."""

    def answers(rows: Iterable[Row]) -> Iterator[Result]:
        with stem_edge.load(bundle, **loading) as model:
            yield from answer(model, rows, settings)

    return answers


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    loading, settings = split({"max_new_tokens": args.new_tokens}, None, args.bundle)
    sides = (
        here(args.bundle, loading, settings),
        stem_edge.ray_answers(args.bundle, loading, settings, "local"),
    )
    rounds = list[tuple[Run, Run]]()
    for number in range(args.rounds):
        order = (1, 0) if number % 2 else (0, 1)
        found = {side: timed(sides[side], rows_of(args.rows)) for side in order}
        rounds.append((found[0], found[1]))
    if args.json:
        print(json.dumps([{"here": one._asdict(), "ray": ray._asdict()} for one, ray in rounds]))
        return 0
    print(f"rows a second here: {_spread([one.rate for one, _ in rounds], '.0f')}")
    print(f"on Ray: {_spread([ray.rate for _, ray in rounds], '.0f')}")
    print(f"on Ray / here: {_spread([ray.rate / one.rate for one, ray in rounds], '.3f')}")
    print(
        f"seconds that Ray took more: {_spread([ray.seconds - one.seconds for one, ray in rounds], '.1f')}"
    )
    return 0


def _spread(values: Sequence[float], form: str) -> str:
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


if __name__ == "__main__":
    sys.exit(main())
