"""Native code that may crash, hang or eat memory runs in a child process first: how it is bounded.

The parent waits so many seconds, for all or for each step that the child tells; the child bounds its
own memory and processor time, for the case that its parent is gone. Windows has only the first.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

WINDOWS_CRASH = 0xC0000000  # exit statuses from here on are exceptions
SIGKILL = 9  # which Windows does not name
# No child of ours needs more than a thread of numpy or of tokenizers; and ggml is not to start a
# debugger when it gives up.
VARIABLES = {
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GGML_NO_BACKTRACE": "1",
}
# The package may be where only our own interpreter looks. It comes last, so that it hides nothing.
_RUN_MODULE = """\
import runpy, sys
sys.path.append({folder!r})
runpy.run_module({name!r}, run_name="__main__", alter_sys=True)"""


class Ended(NamedTuple):
    """A child process that is no more."""

    status: int | None  # exit status, negative a signal; None: it was ended after its seconds
    stdout: bytes
    stderr: bytes

    @property
    def crashed(self) -> bool:
        """Whether a signal or a Windows exception ended it."""
        return self.status is not None and not 0 <= self.status < WINDOWS_CRASH


def module_command(name: str, *arguments: str) -> list[str]:
    """What runs a module of ours in another interpreter.

    -P: modules never come from the folder that we happen to be in, which may be a bundle.
    """
    code = _RUN_MODULE.format(folder=str(Path(__file__).resolve().parents[2]), name=name)
    return [sys.executable or "python3", "-P", "-c", code, *arguments]


def run_child(
    command: Sequence[str], seconds: float, variables: Mapping[str, str] | None = None
) -> Ended:
    """Run a command without input, to its end or for so long. Raises OSError if it cannot start.

    variables: of its environment, beside ours and VARIABLES.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, **VARIABLES, **(variables or {})},
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return Ended(None, error.stdout or b"", error.stderr or b"")
    return Ended(done.returncode, done.stdout, done.stderr)


def run_steps(command: Sequence[str], start_seconds: float, step_seconds: float) -> Ended:
    """Run a command without input that tells its steps, each a line of stdout before it is done.

    start_seconds: to the first line, which covers what is imported before. step_seconds: from one
    to the next, and from the last to its end. Raises OSError if it cannot start, MemoryError if no
    thread can.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **VARIABLES},
    )
    steps, said = queue.SimpleQueue[bytes](), list[bytes]()
    told, readers, ended = list[bytes](), list[threading.Thread](), False
    try:
        # Windows cannot wait for a pipe, and a pipe that nobody empties stops whoever writes.
        for pipe, take in ((process.stdout, steps.put), (process.stderr, said.append)):
            reader = threading.Thread(
                target=pass_lines, args=(pipe, take), name="stem-edge-child", daemon=True
            )
            try:
                reader.start()
            except RuntimeError as error:  # what Python calls a thread that the system refuses
                raise MemoryError(str(error)) from error
            readers.append(reader)
        while step := steps.get(timeout=step_seconds if told else start_seconds):
            told.append(step)
        process.wait(step_seconds)  # it closed stdout, and may still not end
        ended = True
    except (queue.Empty, subprocess.TimeoutExpired):
        pass
    finally:
        process.kill()
        process.wait()
        for reader in readers:
            reader.join()
    return Ended(process.returncode if ended else None, b"".join(told), b"".join(said))


def pass_lines(pipe: IO[bytes], take: Callable[[bytes], object], most: int = -1) -> None:
    """Give each line of a pipe away, cut after so many bytes; when it is closed, an empty one."""
    with pipe:
        while line := pipe.readline(most):
            take(line)
        take(b"")


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
