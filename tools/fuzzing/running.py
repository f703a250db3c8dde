"""Reading one input after the other within limits, and judging how each ends."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Never

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from fuzzing.mutants import mutants
from fuzzing.targets import TARGETS, Read, seeds_of
from stem_edge.errors import OutOfMemoryError, StemEdgeError

SECONDS = 10.0  # that reading one input may take
MEMORY_NBYTES = 1 << 30  # that a process may take beside what it has
MAX_MESSAGE_CHARS = 2000
BATCH = 100  # draws after which hypothesis forgets what it drew; it remembers all of a batch
REPORT_EVERY = 200
INPUT, TALLY = "input", "tally.json"  # what a process is doing, for whoever watches it


class TooSlowError(BaseException):
    """An input took longer than SECONDS. No Exception: nothing on the way shall catch it."""


class FaultError(Exception):
    """An input ended as none may."""


@dataclass
class Order:
    """What a process is to do."""

    target: str
    folder: Path  # its own: what it is doing, and files that the target reads
    findings: Path
    runs: int
    seconds: float
    seed: int
    guided: bool = False
    replay: bytes | None = None


@dataclass
class Runner:
    """A prepared target, and what was seen of it."""

    read: Read
    folder: Path  # that every message must name a file of
    findings: Path
    executions: int = 0
    accepted: int = 0
    slowest: float = 0.0
    ends: set[str] = field(default_factory=set)  # lines at which inputs were refused
    failed: bool = False

    def run(self, data: bytes) -> str:
        """Read one input; how it ended. Raises FaultError, the input written to `findings`."""
        started = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            self.read(data)
            self.accepted += 1
            return "accepted"
        except StemEdgeError as error:
            self.ends.add(_place(error))
            if fault := _fault(error, self.folder):
                self._fail(fault, error, data)
            return f"refused: {error}"
        except (Exception, TooSlowError) as error:
            self._fail(type(error).__name__, error, data)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.executions += 1
            self.slowest = max(self.slowest, time.perf_counter() - started)

    def _fail(self, kind: str, error: BaseException, data: bytes) -> Never:
        """hypothesis looks for smaller inputs that end alike: the last one, which is kept, is the least."""
        self.failed = True
        what = f"{kind} at {_place(error)}"
        path = write_finding(self.findings, what, data)
        raise FaultError(f"{path}: {what}: {ascii(str(error))[:400]}") from error


def write_finding(folder: Path, what: str, data: bytes) -> Path:
    """Keep an input by how it ended."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"finding-{hashlib.sha256(what.encode()).hexdigest()[:12]}"
    path.write_bytes(data)
    return path


def _place(error: BaseException) -> str:
    """The innermost line, of what caused it where something did."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return f"{step.tb_frame.f_code.co_filename}:{step.tb_lineno}" if step is not None else "nowhere"


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

        found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
        taken = int(found[1]) << 10 if found else 0
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (taken + MEMORY_NBYTES, hard))


def property_of(
    name: str, one: Callable[[bytes], object], seed: int = 0, draws: int = BATCH
) -> Callable[[], None]:
    """The property that all mutants of a target's seeds end well, as hypothesis tries it."""

    @hypothesis.seed(seed)
    @settings(
        max_examples=draws,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(mutants(TARGETS[name].change, list(seeds_of(name).values())))
    def all_end_well(inputs: Iterator[bytes]) -> None:
        for data in inputs:
            one(data)

    return all_end_well


def explore(runner: Runner, order: Order, one: Callable[[bytes], object]) -> None:
    """Try mutants, in batches, until the order is done or one fails."""
    end = time.monotonic() + order.seconds

    def until_done(data: bytes) -> None:
        if runner.failed or not done():  # then hypothesis looks for less that fails alike
            one(data)

    def done() -> bool:
        return runner.executions >= order.runs or time.monotonic() > end

    draws = 1  # few at first: a batch is not cut off
    for number in itertools.count(order.seed * 1_000_003):
        if done():
            return
        property_of(order.target, until_done, number, draws)()
        draws = min(BATCH, 2 * draws)


def work(order: Order) -> None:
    """Do it, in a process of its own that whoever started it watches; exit status 1 for a fault."""
    atheris = _atheris() if order.guided else None
    with ExitStack() as end:
        with atheris.instrument_imports(include=["stem_edge"]) if atheris else nullcontext():
            read = TARGETS[order.target].prepare(order.folder, end)
        limit_this_process()
        runner = Runner(read, order.folder, order.findings)
        started = time.monotonic()

        def one(data: bytes) -> str:
            (order.folder / INPUT).write_bytes(data)
            how = runner.run(data)
            if runner.executions % REPORT_EVERY == 0:
                report(runner, started)
            return how

        try:
            if order.replay is not None:
                print(one(order.replay))
            elif atheris:
                _guided(atheris, order, one)
            else:
                explore(runner, order, one)
        except FaultError as fault:
            sys.exit(str(fault))
        finally:
            report(runner, started)


def report(runner: Runner, started: float) -> None:
    """Write what was done so far."""
    found = {name: getattr(runner, name) for name in ("executions", "accepted", "slowest")}
    found |= {"seconds": time.monotonic() - started, "ends": len(runner.ends)}
    (runner.folder / TALLY).write_text(json.dumps(found))


def _atheris() -> Any:
    """Imported only where it is asked for; it is not everywhere."""
    import atheris  # type: ignore[import-untyped,import-not-found,unused-ignore]

    return atheris


def _guided(atheris: Any, order: Order, one: Callable[[bytes], object]) -> None:
    """Let libFuzzer choose what hypothesis draws, by the lines that it reaches; ends the process."""
    options = [f"-runs={order.runs}", f"-max_total_time={int(min(order.seconds, 1e9))}"]
    options += [f"-seed={order.seed + 1}", "-timeout=0", "-handle_alrm=0", "-rss_limit_mb=0"]
    # libFuzzer would write its own input, which is no file but what hypothesis drew one from.
    options += [f"-artifact_prefix={order.folder}/", "-len_control=0"]
    test: Any = property_of(order.target, one)
    atheris.Setup([sys.argv[0], *options], test.hypothesis.fuzz_one_input)
    atheris.Fuzz()
