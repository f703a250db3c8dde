"""Run one input after the other within limits of time and memory, and judge how each ends."""

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

if TYPE_CHECKING:  # because targets import this module
    from fuzzing.targets import Target

SEEDS = Path(__file__).resolve().parents[2] / "tests" / "data" / "fuzz"
SECONDS = 10.0  # for one input
SHRINK_SECONDS = 30.0
MEMORY_NBYTES = 1 << 30  # on top of what the process has allocated at the start
MAX_MESSAGE_CHARS = 2000


class TooSlowError(BaseException):
    """An input took longer than SECONDS. Not an Exception, so that no reader catches it."""


class FaultError(Exception):
    """An input was neither read nor refused properly."""


@dataclass
class Runner:
    """Runs inputs on a target, and counts how they end."""

    target: Target
    folder: Path  # holds the file that is read; every message must contain this path
    findings: Path
    executions: int = 0
    accepted: int = 0
    slowest: float = 0.0
    refused_at: set[str] = field(default_factory=set)  # source lines, as FILE:NUMBER

    def run(self, data: bytes) -> str:
        """Read one input and return how it ended.

        Raises FaultError after writing a minimized input with the same fault to `findings`.
        """
        words, fault = self._read(data)
        if fault is None:
            return words
        small = shrink(data, lambda less: self._read(less)[1] == fault)
        path = self.findings / f"finding-{hashlib.sha256(fault.encode()).hexdigest()[:12]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(small)
        raise FaultError(f"{path}: {fault}: {ascii(words)[:400]}")

    def _read(self, data: bytes) -> tuple[str, str | None]:
        """Read an input; return how that ended, and what is wrong with it (None: nothing)."""
        path, started = self.folder / self.target.file, time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            path.write_bytes(data)
            self.target.read(path)
            self.accepted += 1
            return "accepted", None
        except StemEdgeError as error:
            self.refused_at.add(_place(error))
            fault = _fault(error, self.folder)
            return f"refused: {error}", fault and f"{fault} at {_place(error)}"
        except (Exception, TooSlowError) as error:
            return str(error), f"{type(error).__name__} at {_place(error)}"
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self.executions += 1
            self.slowest = max(self.slowest, time.perf_counter() - started)


def shrink(data: bytes, fails: Callable[[bytes], bool]) -> bytes:
    """Return smaller data that still fails: drop pieces, large ones first, while time is left."""
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
    """Return the source line (FILE:NUMBER) that raised the root cause of an error."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return f"{step.tb_frame.f_code.co_filename}:{step.tb_lineno}" if step is not None else "nowhere"


def _fault(error: StemEdgeError, folder: Path) -> str | None:
    """Return what is wrong with the error of a refused input; None if nothing is wrong."""
    message = str(error)
    if isinstance(error, OutOfMemoryError):
        return f"took more than {MEMORY_NBYTES} bytes"
    if len(message) > MAX_MESSAGE_CHARS:
        return "long message"
    if not message.isprintable():
        return "unprintable message"
    # Messages for the clients of a server contain no path.
    if str(folder) not in message and "of this bundle" not in message:
        return "message without the file"
    return None


def limit_this_process() -> None:
    """Make slow inputs raise TooSlowError, and large ones MemoryError (Linux)."""

    def too_slow(number: int, frame: FrameType | None) -> None:
        raise TooSlowError(f"longer than {SECONDS:g} s")

    signal.signal(signal.SIGALRM, too_slow)
    if sys.platform == "linux":
        import resource

        found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
        taken = int(found[1]) << 10 if found else 0
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (taken + MEMORY_NBYTES, hard))
