"""Child processes: commands that start them, their limits, and their exit status."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REFUSED = 11  # exit status of a worker that printed an error: "ErrorClass: message"
INTERRUPTED = 130  # exit status of a worker whose parent has ended
SIGKILL = 9  # the signal module of Windows lacks it
# A new process may not find this package, so code_command adds its folder: last, to hide no module.
_RUN_MODULE = """\
import runpy
runpy.run_module({name!r}, run_name="__main__", alter_sys=True)"""


def module_command(name: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module of this package in a new Python process."""
    return code_command(_RUN_MODULE.format(name=name), *arguments)


def code_command(code: str, *arguments: str) -> list[str]:
    """Return the command line that runs code in a new Python process; it can import this package.

    -P keeps it from importing modules from the current folder, which may be an untrusted bundle.
    """
    here = f"import sys\nsys.path.append({str(Path(__file__).resolve().parents[2])!r})\n"
    return [sys.executable or "python3", "-P", "-c", here + code, *arguments]


def run_worker(command: Sequence[str]) -> tuple[int, bytes]:
    """Run a worker process with this process's stderr; return its exit status and stdout.

    The worker must call `end_with_parent` in a thread. Raises OSError if it cannot start.
    """
    pipe = subprocess.PIPE
    # In a session of its own, so that Ctrl-C leaves no traceback of its imports.
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as process:
        try:
            said = b"" if process.stdout is None else process.stdout.read()
            return process.wait(), said
        except BaseException:
            process.terminate()
            raise


def limit_this_process(memory_nbytes: int, cpu_seconds: int) -> None:
    """Limit memory and processor time of this process from now on, and disable core dumps.

    Beyond the memory limit, allocations fail. Beyond the time limit, SIGXCPU ends the process.
    """
    if sys.platform == "win32":
        return
    import resource

    # RLIMIT_CPU counts from the start of the process, so add what is used already.
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + cpu_seconds
    wanted = {"RLIMIT_DATA": memory_nbytes, "RLIMIT_CPU": seconds, "RLIMIT_CORE": 0}
    for name, value in wanted.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        if hard == resource.RLIM_INFINITY or value <= hard:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(number, (value, hard))


def end_with_parent() -> None:
    """Wait until stdin closes, which means that the parent has ended; then end this process."""
    os.read(0, 1)  # not by sys.stdin, whose lock would be held when the interpreter ends
    os._exit(INTERRUPTED)  # without cleaning up, as if killed


def signal_name(status: int) -> str:
    """Return the name of the signal in a negative exit status: "SIGSEGV" for -11."""
    with contextlib.suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"


def last_line(output: bytes | None) -> str:
    lines = (output or b"").decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it printed nothing"
