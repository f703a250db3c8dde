"""Worker processes: phases in order, errors of the engine, and reported crashes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import TypeAlias

import pytest
from installed import DEMO
from servers import wait_for

from stem_edge.apps.measuring.runs import workers
from stem_edge.apps.measuring.runs.results import Phase
from stem_edge.apps.measuring.runs.workers import Subject, WorkerProcess
from stem_edge.errors import BackendError, BundleError, InputError, MemoryPlanError, StemEdgeError

POSIX = pytest.mark.skipif(os.name != "posix", reason="signals end processes on POSIX systems")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
Scripted: TypeAlias = Callable[[str], Subject]
ANSWERS = "import json, os, sys, time\nfor line in sys.stdin:\n    "


def demo(**options: object) -> Subject:
    return Subject("demo", "stem-edge", str(DEMO), {"slots": 64, **options})


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Subject]:
    """Workers of a subject that run a script instead of an engine."""

    def make(script: str) -> Subject:
        monkeypatch.setattr(workers, "COMMAND", script)
        return Subject("x", "stem-edge", "y")

    return make


def load(worker: WorkerProcess, context: int = 16) -> list[Phase]:
    return [worker.ask(name, **what) for name, what in worker.subject.loading(context, 1)]


def own_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.usefixtures("own_cache_folder")
def test_a_whole_run() -> None:
    with closing(WorkerProcess(demo())) as worker:
        started, loaded = load(worker, context=64)
        prompts = [worker.ask("prompt", ids=list(range(20))) for _ in range(2)]
        decoded = worker.ask("decode", ids=[5, 6, 7])
    assert started.seconds > 0 and started.counters == {}
    assert loaded.counters["slots"] == 64 and loaded.counters["hits"] == 0
    counters = decoded.counters
    assert len(decoded.steps) == 3 and min(decoded.steps) > 0
    assert sum(decoded.steps) <= decoded.seconds
    assert counters["hits"] + counters["misses"] == 43 and counters["misses"] == 20
    assert min(counters[name] for name in ("planned", "bytes_read", "kv_nbytes")) > 0
    assert counters["row_cache_nbytes"] > 0
    for answer in (started, loaded, *prompts, decoded):
        assert answer.memory.peak_unevictable >= answer.memory.at_end.unevictable > 0
    assert loaded.memory.at_end.unevictable > started.memory.at_end.unevictable


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subject", "error", "words"),
    [
        (Subject("x", "stem-edge", "/none"), BundleError, "/none"),
        (demo(memory=1_000_000), MemoryPlanError, "at least"),
        (demo(kv="telepathy"), InputError, "telepathy"),
    ],
)
def test_an_error_of_the_engine_is_the_same_here(
    subject: Subject, error: type[StemEdgeError], words: str
) -> None:
    with closing(WorkerProcess(subject)) as worker:
        for _ in range(2):  # it stays alive and answers again
            with pytest.raises(StemEdgeError, match=words) as raised:
                load(worker)
            assert type(raised.value) is error


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("BackendError", "a: b", (BackendError, "a: b")),
        ("MemoryError", "", (StemEdgeError, "x failed in phase start: MemoryError; if it")),
        ("ValueError", "two\nlines", (StemEdgeError, "in phase start: ValueError two lines; if")),
        ("annotations", "no class", (StemEdgeError, "annotations no class")),
        ("KeyboardInterrupt", "z", (StemEdgeError, "KeyboardInterrupt z")),
    ],
)
def test_what_is_no_error_of_ours_is_one_line_with_its_name(
    scripted: Scripted, kind: str, text: str, expected: tuple[type[StemEdgeError], str]
) -> None:
    answer = f"print(json.dumps({{'error': {text!r}, 'type': {kind!r}}}), flush=True)"
    subject = scripted(ANSWERS + answer)
    with closing(WorkerProcess(subject)) as worker, pytest.raises(StemEdgeError) as raised:
        worker.ask("start")
    assert type(raised.value) is expected[0]
    assert expected[1] in str(raised.value) and "\n" not in str(raised.value)


@POSIX
@pytest.mark.parametrize(
    ("ends", "words"),
    [(signal.SIGKILL, "the system killed it"), (signal.SIGTERM, "signal 15; see what it printed")],
)
def test_a_worker_that_is_killed_while_it_works(
    scripted: Scripted, ends: signal.Signals, words: str
) -> None:
    with closing(WorkerProcess(scripted(ANSWERS + "time.sleep(60)"))) as worker:

        def kill_when_watched() -> None:
            wait_for(watched)
            os.kill(worker._process.pid, ends)

        thread = threading.Thread(target=kill_when_watched)
        thread.start()
        with pytest.raises(StemEdgeError, match=f"in phase prompt: {words}"):
            worker.ask("prompt", ids=[1])
        thread.join()


def watched() -> bool:
    return any(thread.name == "stem-edge-sampler" for thread in threading.enumerate())


def ended(worker: WorkerProcess) -> bool:
    return (
        worker._process.returncode is not None and not Path(f"/proc/{worker._process.pid}").exists()
    )


@LINUX
def test_close_leaves_no_process_no_file_and_no_thread() -> None:
    fds, threads = own_fds(), set(threading.enumerate())
    worker = WorkerProcess(demo())
    worker.ask("start")
    worker.close()
    assert ended(worker)
    worker.close()  # again
    assert own_fds() == fds and not set(threading.enumerate()) - threads


@LINUX
@pytest.mark.parametrize("interrupted", [False, True])
def test_a_worker_that_is_busy_is_killed(scripted: Scripted, interrupted: bool) -> None:
    fds = own_fds()
    with (
        suppress(KeyboardInterrupt),
        closing(WorkerProcess(scripted("import time; time.sleep(60)"))) as busy,
    ):
        if interrupted:
            raise KeyboardInterrupt
    assert ended(busy) and busy._process.returncode == -signal.SIGKILL
    assert own_fds() == fds
