"""One fuzzing process: `python tools/fuzz_worker.py ORDER.json`, started by tools/fuzz.py.

What it is doing lies in a mapped file all the time, so that its parent can say which input made it
hang or end.
"""

from __future__ import annotations

import json
import mmap
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import msgspec
from fuzz_bytes import MAX_NBYTES
from fuzz_lines import all_lines, source_files
from fuzz_run import Corpus, Findings, Runner, explore, limit_this_process, lines_of
from fuzz_targets import TARGETS, Target

HEAD = struct.Struct("<QI")  # executions begun, bytes of the input
NOW_NBYTES = HEAD.size + (1 << 21)
REPORT_EVERY = 200


class Order(msgspec.Struct):
    """What a worker is to do."""

    target: str
    runs: int
    seconds: float
    seed: int
    guided: bool
    folder: str  # its own: now, result.json, corpus/
    findings: str | None


class Result(msgspec.Struct):
    """What it has done so far."""

    executions: int = 0
    accepted: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    findings: dict[str, str] = {}
    lines: int = 0
    all_lines: int = 0
    missed: list[str] = []


class Now:
    """The input that is being read, where the parent can see it."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(NOW_NBYTES))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), NOW_NBYTES)
        self._count = 0

    def set(self, data: bytes) -> None:
        """Say that this input is next."""
        self._count += 1
        kept = data[: NOW_NBYTES - HEAD.size]
        self._map[: HEAD.size + len(kept)] = HEAD.pack(self._count, len(kept)) + kept


def read_now(path: Path) -> tuple[int, bytes]:
    """Number and bytes of the input that a worker is reading."""
    data = path.read_bytes() if path.exists() else bytes(HEAD.size)
    count, nbytes = HEAD.unpack_from(data)
    return count, data[HEAD.size : HEAD.size + nbytes]


def work(order: Order) -> None:
    """Run an order; results are in its folder."""
    target, own = TARGETS[order.target], Path(order.folder)
    atheris: Any = import_atheris() if order.guided else None
    with atheris.instrument_imports(include=list(target.modules)) if atheris else nullcontext():
        if missing := target.missing():
            sys.exit(f"{order.target}: {missing}")
    now, started = Now(own / "now"), time.monotonic()
    seeds = list(target.seeds(order.target).values())
    findings = Findings(Path(order.findings) if order.findings else None)
    with tempfile.TemporaryDirectory(dir=own) as folder, ExitStack() as end:
        read = target.prepare(Path(folder), end)
        limit_this_process()

        def noted(data: bytes) -> object:
            now.set(data)
            return read(data)

        runner = Runner(noted, Path(folder), findings)
        if atheris:
            _guided(atheris, runner, target, seeds, order, lambda: _report(runner, own, started))
        corpus = Corpus(seeds)
        for data in seeds:
            corpus.ends.add(runner.run(data))
        explore(runner, target, corpus, order.seed, order.runs, order.seconds)
        result = _report(runner, own, started)
        _add_lines(result, runner, target, corpus.inputs)
        (own / "result.json").write_bytes(msgspec.json.encode(result))


def import_atheris() -> ModuleType:
    """atheris, which is imported only where it is used."""
    import atheris  # type: ignore[import-untyped,unused-ignore]

    module: ModuleType = atheris
    return module


def _guided(
    atheris: Any,
    runner: Runner,
    target: Target,
    seeds: list[bytes],
    order: Order,
    report: Callable[[], object],
) -> None:
    """Let libFuzzer choose; it ends the process."""
    corpus = Path(order.folder) / "corpus"
    corpus.mkdir()
    for number, data in enumerate(seeds):
        (corpus / f"seed-{number}").write_bytes(data)
    pool = seeds[:]

    def one(data: bytes) -> None:
        runner.run(data)
        if runner.executions % REPORT_EVERY == 0 or runner.executions >= order.runs:
            report()

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = Random(seed)
        if rng.randrange(200) == 0 and len(pool) < 1000:
            pool.append(data)
        return target.mutate(data, rng.choice(pool), rng)[:max_size]

    options = [
        f"-runs={order.runs}", f"-max_total_time={int(order.seconds)}", f"-seed={order.seed + 1}",
        f"-max_len={MAX_NBYTES}", "-timeout=0", "-handle_alrm=0", "-rss_limit_mb=0",
        "-reload=0", "-len_control=0", "-print_final_stats=1", str(corpus),
    ]  # fmt: skip
    atheris.Setup([sys.argv[0], *options], one, custom_mutator=mutate)
    atheris.Fuzz()


def _report(runner: Runner, own: Path, started: float) -> Result:
    result = Result(
        executions=runner.executions,
        accepted=runner.accepted,
        seconds=time.monotonic() - started,
        slowest=runner.slowest,
        findings=runner.findings.kinds,
    )
    (own / "result.json").write_bytes(msgspec.json.encode(result))
    return result


def _add_lines(result: Result, runner: Runner, target: Target, inputs: list[bytes]) -> None:
    reachable, found = all_lines(source_files(target.modules)), lines_of(runner, target, inputs)
    result.lines, result.all_lines = len(found & reachable), len(reachable)
    result.missed = [f"{Path(file).name}:{line}" for file, line in sorted(reachable - found)]


def count_lines(order: Order) -> Result:
    """Lines that the corpus of a guided worker reaches; it cannot say so itself."""
    target, own = TARGETS[order.target], Path(order.folder)
    result = msgspec.json.decode((own / "result.json").read_bytes(), type=Result)
    if target.missing() is None:
        inputs = [path.read_bytes() for path in sorted((own / "corpus").iterdir())]
        with tempfile.TemporaryDirectory(dir=own) as folder, ExitStack() as end:
            runner = Runner(target.prepare(Path(folder), end), Path(folder), Findings(None))
            _add_lines(result, runner, target, inputs)
    return result


if __name__ == "__main__":
    work(msgspec.convert(json.loads(Path(sys.argv[1]).read_text()), Order))
