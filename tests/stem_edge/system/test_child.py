"""Child processes with limits of time and memory, and reports on how they end."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from stem_edge.system.child import (
    Ended,
    limit_this_process,
    module_command,
    run_child,
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


@pytest.mark.slow
@needs_posix
@pytest.mark.parametrize("said", [b"", b"one\ntwo"])
def test_a_child_that_does_not_end(said: bytes) -> None:
    code = f"import os, time; os.write(1, {said!r}); os.write(2, {said!r}); time.sleep(600)"
    assert run_child(python(code), 3.0) == (None, said, said)


@needs_posix
def test_a_crash() -> None:
    crashes = python("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    ended = run_child(crashes, LONG)
    assert ended.status == -signal.SIGSEGV and ended.crashed


@pytest.mark.parametrize(
    ("status", "crashed"),
    [(None, False), (0, False), (1, False), (0xBFFFFFFF, False), (0xC0000000, True), (-1, True)],
)
def test_what_a_crash_is(status: int | None, crashed: bool) -> None:
    assert Ended(status, b"", b"").crashed == crashed


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
