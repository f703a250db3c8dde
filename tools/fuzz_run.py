"""Running a target on one input after the other, and judging how each ends."""

from __future__ import annotations

import hashlib
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, TypeAlias

from fuzz_lines import reached, source_files
from fuzz_targets import Target

from stem_edge.errors import OutOfMemoryError, StemEdgeError

SECONDS = 10.0  # that reading one input may take
MEMORY_NBYTES = 1 << 30  # that a process may take beside what it has
MAX_MESSAGE_CHARS = 2000
MAX_CORPUS = 4000
TRACE_EVERY = 500  # inputs whose lines are looked at, for new ones
MAX_FINDINGS = 50
Where: TypeAlias = tuple[str, int]


class TooSlowError(BaseException):
    """An input took longer than SECONDS. No Exception: nothing on the way shall catch it."""


@dataclass
class Findings:
    """Inputs that ended as none may, one of each kind."""

    folder: Path | None
    kinds: dict[str, str] = field(default_factory=dict)  # what happened -> name of the file

    def add(self, kind: str, what: str, data: bytes) -> None:
        """Keep an input, if it is the first that ends so."""
        if kind in self.kinds or len(self.kinds) >= MAX_FINDINGS:
            return
        name = f"finding-{hashlib.sha256(data).hexdigest()[:12]}"
        self.kinds[kind] = name
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(data)
        print(f"finding {name}: {kind}: {ascii(what)[:400]}", file=sys.stderr, flush=True)


@dataclass
class Runner:
    """A prepared target, and what was seen of it."""

    read: Callable[[bytes], object]
    folder: Path
    findings: Findings
    executions: int = 0
    accepted: int = 0
    slowest: float = 0.0

    def run(self, data: bytes) -> tuple[Where, ...]:
        """Read one input; returns where it was refused, nothing if it was not."""
        started = time.perf_counter()
        where: tuple[Where, ...] = ()
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            self.read(data)
            self.accepted += 1
        except StemEdgeError as error:
            where = _places(error)
            if fault := _fault(error, self.folder):
                self.findings.add(f"{fault} at {where[-1]}", str(error), data)
        except (Exception, TooSlowError) as error:
            where = _places(error)
            self.findings.add(f"{type(error).__name__} at {where[-1]}", str(error), data)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self.executions += 1
        self.slowest = max(self.slowest, time.perf_counter() - started)
        return where


def _places(error: BaseException) -> tuple[Where, ...]:
    found, step = [], error.__traceback__
    while step is not None:
        found.append((step.tb_frame.f_code.co_filename, step.tb_lineno))
        step = step.tb_next
    inner = error.__cause__ or error.__context__
    return (_places(inner) if inner is not None else ()) + tuple(found)


def _fault(error: StemEdgeError, folder: Path) -> str | None:
    """What is wrong with a refusal."""
    message = str(error)
    if isinstance(error, OutOfMemoryError):
        return f"took more than {MEMORY_NBYTES} bytes"
    if len(message) > MAX_MESSAGE_CHARS:
        return "long message"
    if not message.isprintable():
        return "message that is not printable"
    if str(folder) not in message:
        return "message that names no file"
    return None


def limit_this_process() -> None:
    """Slow inputs raise TooSlowError, those that take too much memory MemoryError."""

    def too_slow(number: int, frame: FrameType | None) -> None:
        raise TooSlowError(f"longer than {SECONDS:g} s")

    signal.signal(signal.SIGALRM, too_slow)
    if sys.platform == "linux":
        import resource

        status = Path("/proc/self/status").read_text()
        found = re.search(r"VmData:\s+(\d+) kB", status)
        taken = int(found[1]) << 10 if found else 0
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (taken + MEMORY_NBYTES, hard))


@dataclass
class Corpus:
    """Inputs that new ones are made of: seeds, and what ended where nothing had ended before."""

    inputs: list[bytes]
    ends: set[Any] = field(default_factory=set)
    lines: set[Where] = field(default_factory=set)

    def keep(self, data: bytes) -> None:
        """Add an input."""
        if len(self.inputs) < MAX_CORPUS:
            self.inputs.append(data)

    def pick(self, rng: Random) -> bytes:
        """One of them, those that were added last more often."""
        if rng.randrange(3) == 0:
            return rng.choice(self.inputs[-50:])
        return rng.choice(self.inputs)


def explore(
    runner: Runner, target: Target, corpus: Corpus, seed: int, runs: int, seconds: float
) -> None:
    """Mutate and run; guided by where inputs are refused and, of a few, by the lines they reach."""
    rng, files = Random(seed), source_files(target.modules)
    deadline = time.monotonic() + seconds
    for number in range(runs):
        if number % 256 == 0 and time.monotonic() > deadline:
            return
        data = target.mutate(corpus.pick(rng), rng.choice(corpus.inputs), rng)
        where = runner.run(data)
        if where not in corpus.ends:
            corpus.ends.add(where)
            corpus.keep(data)
        elif number % TRACE_EVERY == 0:
            new = reached(lambda data=data: runner.read(data), files) - corpus.lines  # type: ignore[misc]
            if new:
                corpus.lines |= new
                corpus.keep(data)


def lines_of(runner: Runner, target: Target, inputs: list[bytes]) -> set[Where]:
    """Lines of the target's modules that these inputs reach."""
    files, found = source_files(target.modules), set[Where]()
    for data in inputs:
        found |= reached(lambda data=data: runner.read(data), files)  # type: ignore[misc]
    return found
