"""Reading one input after the other within limits, and judging how each ends."""

from __future__ import annotations

import hashlib
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from stem_edge.errors import OutOfMemoryError, StemEdgeError

if TYPE_CHECKING:  # atheris follows what is imported after it
    from fuzzing.targets import Target

SEEDS = Path(__file__).resolve().parents[2] / "tests" / "data" / "fuzz"
SECONDS = 10.0  # that reading one input may take
SHRINK_SECONDS = 30.0
MEMORY_NBYTES = 1 << 30  # that a process may take beside what it has
MAX_MESSAGE_CHARS = 2000


class TooSlowError(BaseException):
    """An input took longer than SECONDS. No Exception: nothing on the way shall catch it."""


class FaultError(Exception):
    """An input ended as none may."""


@dataclass
class Runner:
    """A prepared target, and what was seen of it."""

    target: Target
    folder: Path  # of the file that is read, which every message must name
    findings: Path
    executions: int = 0
    accepted: int = 0
    slowest: float = 0.0
    ends: set[str] = field(default_factory=set)  # lines at which inputs were refused

    def run(self, data: bytes) -> str:
        """Read one input; how it ended. Raises FaultError, an input that ends alike in `findings`."""
        words, fault = self._read(data)
        if fault is None:
            return words
        small = shrink(data, lambda less: self._read(less)[1] == fault)
        path = self.findings / f"finding-{hashlib.sha256(fault.encode()).hexdigest()[:12]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(small)
        raise FaultError(f"{path}: {fault}: {ascii(words)[:400]}")

    def _read(self, data: bytes) -> tuple[str, str | None]:
        """How an input ended, and what is wrong with that."""
        path, started = self.folder / self.target.file, time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            path.write_bytes(data)
            self.target.read(path)
            self.accepted += 1
            return "accepted", None
        except StemEdgeError as error:
            self.ends.add(_place(error))
            fault = _fault(error, self.folder)
            return f"refused: {error}", fault and f"{fault} at {_place(error)}"
        except (Exception, TooSlowError) as error:
            return str(error), f"{type(error).__name__} at {_place(error)}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.executions += 1
            self.slowest = max(self.slowest, time.perf_counter() - started)


def shrink(data: bytes, fails: Callable[[bytes], bool]) -> bytes:
    """Leave out pieces, large ones first, for as long as what is left fails and the time lasts."""
    length, end = len(data) // 2, time.monotonic() + SHRINK_SECONDS
    while length:
        at = 0
        while at < len(data) and time.monotonic() < end:
            less = data[:at] + data[at + length :]
            if fails(less):
                data = less
            else:
                at += length
        length //= 2
    return data


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
