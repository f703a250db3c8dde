"""Native code that may crash, hang or eat memory runs in a child process first: how it is bounded.

The parent waits so many seconds; the child bounds its own memory and processor time, for the case
that its parent is gone. Windows has only the first of these.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

PYTHON = sys.executable or "python3"
WINDOWS_CRASH = 0xC0000000  # exit statuses from here on are exceptions
SIGKILL = 9  # which Windows does not name


class Ended(NamedTuple):
    """A child process that is no more."""

    status: int | None  # exit status, negative a signal; None: it was ended after its seconds
    stdout: bytes
    stderr: bytes

    @property
    def crashed(self) -> bool:
        """Whether a signal or a Windows exception ended it."""
        return self.status is not None and not 0 <= self.status < WINDOWS_CRASH


def run_child(
    command: Sequence[str], seconds: float, variables: Mapping[str, str] | None = None
) -> Ended:
    """Run a command without input, to its end or for so long. Raises OSError if it cannot start.

    variables: of its environment, beside our own.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=os.environ | (variables or {}),
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return Ended(None, error.stdout or b"", error.stderr or b"")
    return Ended(done.returncode, done.stdout, done.stderr)


def limit_this_process(memory_nbytes: int, cpu_seconds: int) -> None:
    """Bounds of this process, counted from now on; and no dump of it if it crashes.

    Memory above makes allocations fail, time above ends the process by SIGXCPU.
    """
    if sys.platform == "win32":
        return
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + cpu_seconds
    wanted = {"RLIMIT_DATA": memory_nbytes, "RLIMIT_CPU": seconds, "RLIMIT_CORE": 0}
    for name, value in wanted.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        if hard == resource.RLIM_INFINITY or value <= hard:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(number, (value, hard))


def signal_name(status: int) -> str:
    """Of an exit status that is no exit: "SIGSEGV", or the exception's number on Windows."""
    if status > 0:
        return f"exception {status:#x}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


def last_line(output: bytes | None) -> str:
    """The last line of what a child wrote."""
    lines = (output or b"").decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it said nothing"
