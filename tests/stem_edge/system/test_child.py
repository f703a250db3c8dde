"""Child processes with limits of time and memory, and reports on how they end."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stem_edge.system import child
from stem_edge.system.child import (
    Ended,
    last_line,
    limit_this_process,
    module_command,
    pass_lines,
    run_child,
    run_steps,
    signal_name,
)

LONG = 60.0
needs_posix = pytest.mark.skipif(sys.platform == "win32", reason="no signals or limits")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


SHOW = (
    "import os, sys; print(os.environ.get('TOKENIZERS_PARALLELISM'), os.environ.get('OWN'), "
    "os.environ['OPENBLAS_NUM_THREADS'], os.environ['GGML_NO_BACKTRACE'], sys.stdin.read() == '');"
    "print('said', file=sys.stderr); sys.exit(3)"
)


def test_a_child_ends_and_what_it_said() -> None:
    ended = run_child(python(SHOW), LONG, {"OWN": "x"})
    assert (ended.status, ended.stdout.split()) == (3, [b"false", b"x", b"1", b"1", b"True"])
    assert ended.stderr.strip() == b"said"
    replaced = run_child(python(SHOW), LONG, {"TOKENIZERS_PARALLELISM": "true"})
    assert replaced.stdout.split()[0] == b"true"
    ended = run_steps(python(SHOW), LONG, LONG)
    assert (ended.status, ended.stdout.split()) == (3, [b"false", b"None", b"1", b"1", b"True"])
    assert ended.stderr.strip() == b"said"


@pytest.mark.slow
@needs_posix
@pytest.mark.parametrize("said", [b"", b"one\ntwo"])
def test_a_child_that_does_not_end(said: bytes) -> None:
    code = f"import os, time; os.write(1, {said!r}); os.write(2, {said!r}); time.sleep(600)"
    assert run_child(python(code), 3.0) == (None, said, said)


def test_a_thread_that_cannot_start_is_a_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(MemoryError, match="new thread"):
        run_steps(python("import time; time.sleep(600)"), LONG, LONG)


@needs_posix
def test_a_crash() -> None:
    crashes = python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    for ended in (run_child(crashes, LONG), run_steps(crashes, LONG, LONG)):
        assert ended.status == -signal.SIGSEGV
        assert ended.crashed


def test_a_missing_command() -> None:
    for call in (partial(run_child, ["/nothing"], 1.0), partial(run_steps, ["/nothing"], 1.0, 1.0)):
        with pytest.raises(FileNotFoundError):
            call()


@pytest.mark.slow
def test_steps_may_take_long_together() -> None:
    code = "import time\nfor n in range(6): print(n, flush=True); time.sleep(0.5)\nprint('done')"
    ended = run_steps(python(code), LONG, 2.0)
    assert ended == (0, b"".join(b"%d%s" % (n, EOL) for n in range(6)) + b"done" + EOL, b"")


EOL = os.linesep.encode()


@pytest.mark.slow
@pytest.mark.parametrize("first", ["", "print(1, flush=True); "])
def test_a_step_that_does_not_end(first: str) -> None:
    """Until the first line, only the limit for starting applies."""
    code = f"import sys, time; {first}print('x', file=sys.stderr, flush=True); time.sleep(600)"
    started = time.monotonic()
    times = (LONG, 1.0) if first else (3.0, LONG)
    ended = run_steps(python(code), *times)
    assert time.monotonic() - started < LONG / 2
    assert ended == (None, b"1" + EOL if first else b"", b"x" + EOL)


@pytest.mark.slow
@needs_posix
def test_a_child_that_closes_stdout_and_does_not_end() -> None:
    code = "import os, time; os.close(1); time.sleep(600)"
    assert run_steps(python(code), LONG, 1.0) == (None, b"", b"")


def test_much_output_stops_nobody() -> None:
    code = "import sys; sys.stderr.write('x' * (1 << 20)); print('done')"
    ended = run_steps(python(code), LONG, LONG)
    assert (ended.status, ended.stdout, len(ended.stderr)) == (0, b"done" + EOL, 1 << 20)


def test_an_interrupt_ends_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[subprocess.Popen[bytes]] = []

    class Watched(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    class Interrupted:
        def put(self, line: bytes) -> None:
            pass

        def get(self, timeout: float) -> bytes:
            raise KeyboardInterrupt

    before = set(threading.enumerate())
    monkeypatch.setattr(subprocess, "Popen", Watched)
    queues = SimpleNamespace(SimpleQueue={bytes: Interrupted}, Empty=ValueError)
    monkeypatch.setattr(child, "queue", queues)
    with pytest.raises(KeyboardInterrupt):
        run_steps(python("import time; time.sleep(600)"), LONG, LONG)
    assert made[0].returncode not in (None, 0)
    assert not set(threading.enumerate()) - before


@pytest.mark.parametrize(
    ("most", "lines"), [(-1, [b"ab\n", b"cdef", b""]), (3, [b"ab\n", b"cde", b"f", b""])]
)
def test_lines_are_passed(most: int, lines: list[bytes]) -> None:
    taken: list[bytes] = []
    pipe = io.BytesIO(b"ab\ncdef")
    pass_lines(pipe, taken.append, most)
    assert taken == lines
    assert pipe.closed


@pytest.mark.parametrize(
    ("status", "crashed"),
    [(None, False), (0, False), (1, False), (0xBFFFFFFF, False), (0xC0000000, True), (-1, True)],
)
def test_what_a_crash_is(status: int | None, crashed: bool) -> None:
    assert Ended(status, b"", b"").crashed == crashed


@needs_posix
def test_names_of_signals() -> None:
    assert signal_name(-11) == "SIGSEGV"
    assert signal_name(-9999) == "signal 9999"
    assert signal_name(0xC0000005) == "exception 0xc0000005"
    assert signal_name(1) == "exception 0x1"
    assert child.SIGKILL == signal.SIGKILL


def test_last_lines() -> None:
    for nothing in (None, b"", b" \n\n"):
        assert last_line(nothing) == "it printed nothing"
    assert last_line(b"a\n b \n\n") == "b"
    assert last_line(b"a\n\xff") == "\ufffd"


def test_a_module_in_another_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = module_command("stem_edge.runtime.backends.ggml.library_trial", "a", "b")
    assert (command[0], command[1:3], command[-2:]) == (sys.executable, ["-P", "-c"], ["a", "b"])
    ended = run_child(
        [
            *module_command("stem_edge.runtime.backends.ggml.library_trial"),
            str(tmp_path / "none.so"),
        ],
        LONG,
    )
    assert ended.status == 11
    assert b"none.so" in ended.stderr
    monkeypatch.setattr(sys, "executable", "")
    assert module_command("x")[0] == "python3"


@needs_posix
def test_bounds_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    names = {getattr(resource, f"RLIMIT_{name}"): name for name in ("DATA", "CPU", "CORE")}
    found: dict[str, tuple[int, int]] = {}
    hard = dict.fromkeys(names.values(), resource.RLIM_INFINITY)
    used = SimpleNamespace(ru_utime=2.5, ru_stime=1.75)
    monkeypatch.setattr(resource, "getrusage", lambda who: used)
    monkeypatch.setattr(resource, "getrlimit", lambda number: (0, hard[names[number]]))
    monkeypatch.setattr(
        resource, "setrlimit", lambda number, pair: found.update({names[number]: pair})
    )
    limit_this_process(1000, 7)
    free = resource.RLIM_INFINITY
    assert found == {"DATA": (1000, free), "CPU": (12, free), "CORE": (0, free)}
    # An existing limit must not be raised.
    found.clear()
    hard |= {"DATA": 1000, "CPU": 11}
    limit_this_process(1000, 7)
    assert found == {"DATA": (1000, 1000), "CORE": (0, free)}

    def refuse(number: int, pair: tuple[int, int]) -> None:
        raise ValueError

    monkeypatch.setattr(resource, "setrlimit", refuse)
    limit_this_process(1000, 7)  # as well as it can


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds memory so")
def test_the_memory_of_a_child() -> None:
    code = (
        "from stem_edge.system.child import limit_this_process; limit_this_process(1 << 28, 60)\n"
        "try: bytearray(1 << 29)\nexcept MemoryError: print('no')"
    )
    assert run_child(python(code), LONG).stdout == b"no\n"
