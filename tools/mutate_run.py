"""Running tests against a changed module: in a copy of the tree, in a process forked for each change.

The parent has imported what others made (numpy, pytest, onnxruntime...), nothing of ours; a child
imports ours anew, so it meets the changed module everywhere, also in processes that it starts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import pytest
from boundary import ROOT

Outcome = Literal["killed", "timeout", "survived", "broken"]
COPIED = ("stem_edge", "export", "runtime", "tests", "tools", "pyproject.toml", "README.md")
OWN = ("stem_edge", "tests", "conftest", "test_", "contract", "tools")
MEMORY_NBYTES = 8 << 30  # that a child may take
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=short", "-W", "ignore")
POLL_SECONDS = 0.02
PASSED, NOTHING_COLLECTED = 0, 5


def copy_tree(folder: Path) -> Path:
    """A copy of the tree that can be changed."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("*.pyc") if name != "stem_edge" else None
            shutil.copytree(source, folder / name, symlinks=True, ignore=ignored)
        elif source.exists():
            shutil.copy2(source, folder / name)
    return folder


def enter(folder: Path) -> None:
    """Import from the copy from now on, here and in every process that is started."""
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path[:0] = [str(folder)]


def replace_module(file: Path, source: str) -> None:
    """Write a module with a time that it never had, so that no bytecode of an older form fits."""
    before = int(file.stat().st_mtime)
    file.write_text(source, "utf-8")
    os.utime(file, (before + 2, before + 2))


class Prepared:
    """A pytest plugin: a fixture of the session whose folder is there already."""

    def __init__(self, fixture: str, folder: Path) -> None:
        self._fixture, self._folder = fixture, folder

    @pytest.hookimpl(tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Any:
        """Use the folder, or keep what is made in it."""
        if fixturedef.argname != self._fixture or not self._folder.is_dir():
            return None
        fixturedef.cached_result = (self._folder, fixturedef.cache_key(request), None)
        return self._folder

    @pytest.hookimpl
    def pytest_fixture_post_finalizer(self, fixturedef: Any) -> None:
        """Keep what was made."""
        made = fixturedef.cached_result
        if fixturedef.argname == self._fixture and made and not self._folder.exists():
            shutil.copytree(made[0], self._folder)


def run_tests(tests: Sequence[str], seconds: float, *plugins: object) -> Outcome:
    """Run tests in a child; its memory and time are limited."""
    pid = os.fork()
    if pid == 0:
        _be_child(tests, plugins)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return {PASSED: "survived", NOTHING_COLLECTED: "broken"}.get(code, "killed")  # type: ignore[return-value]
        time.sleep(POLL_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "timeout"


def _be_child(tests: Sequence[str], plugins: Sequence[object]) -> None:
    code = 3
    try:
        os.setsid()
        if sys.platform == "linux":
            import resource

            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_NBYTES, MEMORY_NBYTES))
        sink = os.open(
            os.environ.get("MUTATE_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND
        )
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        own = f"--basetemp={Path.cwd() / 'tmp'}"  # others clear the usual place
        code = int(pytest.main([*OPTIONS, own, *tests], plugins=list(plugins)))
    finally:
        os._exit(code)


class Tracer:
    """A pytest plugin: which lines of one file each test reaches, written as JSON at the end."""

    def __init__(self, file: Path, out: Path) -> None:
        self._file, self._out = str(file), out
        self._test = ""  # before the first: what importing runs
        self._lines: dict[str, set[int]] = {}
        self._seconds: dict[str, float] = {}
        self._seen: dict[str, bool] = {}  # file -> whether it is the one

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if os.path.realpath(frame.f_code.co_filename) != self._file:
            return None
        self._lines.setdefault(self._test, set()).add(frame.f_lineno)
        return self._trace_lines

    def _trace_lines(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self._lines.setdefault(self._test, set()).add(frame.f_lineno)
        return self._trace_lines

    def pytest_sessionstart(self) -> None:
        """Begin."""
        threading.settrace(self._cached)
        sys.settrace(self._cached)

    def _cached(self, frame: FrameType, event: str, arg: Any) -> Any:
        name = frame.f_code.co_filename
        ours = self._seen.get(name)
        if ours is None:
            ours = self._seen[name] = os.path.realpath(name) == self._file
        return self._trace(frame, event, arg) if ours else None

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Lines are of this test now."""
        self._test, started = item.nodeid, time.monotonic()
        yield
        self._seconds[self._test] = time.monotonic() - started

    def pytest_sessionfinish(self) -> None:
        """Write what was seen."""
        sys.settrace(None)
        lines = {test: sorted(found) for test, found in self._lines.items()}
        names = sorted({name.partition(".")[0] for name in sys.modules})
        names = [name for name in names if not name.startswith(OWN) and name != "__main__"]
        self._out.write_text(
            json.dumps({"lines": lines, "seconds": self._seconds, "modules": names})
        )
