"""The trial of ggml in another process, and the verdict that is kept."""

from __future__ import annotations

import os
import platform
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from compiled_ggml import compiled, needs_compiler, needs_library

from stem_edge.errors import BackendError
from stem_edge.ggml.check import check_library, checked_ggml
from stem_edge.ggml.installed import installed_library

# Runs the real trial, whose last product is wrong.
SPOILED = """
import sys
from stem_edge.runtime.backends.ggml import library_trial
right = library_trial.product
def spoiled(processor, kind, count):
    return right(processor, kind, count) * (1 if kind.name != "BF16" or count > 1 else float("nan"))
library_trial.product = spoiled
sys.exit(library_trial.main())
"""


def child(code: str) -> list[str]:
    """Make a command that runs Python code instead of the trial."""
    return [sys.executable, "-c", code]


def marks(into: Path) -> list[str]:
    """Make a command that succeeds and leaves a mark each time."""
    return child(f"open({str(into)!r}, 'a').write('x')")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library's files, which are never loaded."""
    folder = tmp_path / "lib"
    folder.mkdir()
    for name in ("libggml.so", "libggml-cpu.so.0", "libggml-base.so.0"):
        (folder / name).write_bytes(bytes(10))
    return folder / "libggml.so"


class Trials:
    """Checks of a library, and how many children they started."""

    def __init__(self, library: Path, folder: Path) -> None:
        self.library, self.folder, self._mark = library, folder / "cache", folder / "mark"

    def count(self) -> int:
        self._mark.write_text("")
        check_library(self.library, self.folder, marks(self._mark))
        return len(self._mark.read_text())


@pytest.fixture
def trials(library: Path, tmp_path: Path) -> Trials:
    return Trials(library, tmp_path)


@needs_library
def test_a_good_library_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = checked_ggml(tmp_path)
    monkeypatch.setattr("subprocess.run", None)  # no child can be started
    assert checked_ggml(tmp_path).path == first.path
    with pytest.raises(TypeError):
        checked_ggml(tmp_path / "another folder")


def change(part: Path, nbytes: int = 10, seconds: int = 1) -> None:
    part.write_bytes(bytes(nbytes))
    os.utime(part, (seconds, seconds))


CHANGED: dict[str, Callable[[Path], object]] = {
    "nothing": change,
    "the time of a part": lambda part: change(part, seconds=2),
    "the size of a part": lambda part: change(part, nbytes=11),
    "another part": lambda part: part.with_name("libggml-new.so").touch(),
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_verdict_counts_while_the_files_of_the_library_are_the_same(
    what: str, trials: Trials
) -> None:
    part = trials.library.with_name("libggml-cpu.so.0")
    change(part)
    trials.count()
    CHANGED[what](part)
    assert [trials.count(), trials.count()] == [what != "nothing", 0]


@pytest.mark.parametrize("what", ["cpu_digest", "platform.release", "__version__"])
def test_the_processor_the_system_or_stem_edge_changed(
    what: str, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials.count()
    value = "another" if what == "__version__" else lambda: "another"
    monkeypatch.setattr(f"stem_edge.ggml.check.{what}", value)
    assert [trials.count(), trials.count()] == [1, 0]


def test_a_bad_verdict_is_not_kept(trials: Trials) -> None:
    with pytest.raises(BackendError):
        check_library(trials.library, trials.folder, child("raise SystemExit(3)"))
    assert not trials.folder.exists()
    assert trials.count() == 1


DIES = (
    "import os, sys; print('loading it'); print('products of X', flush=True)\n"
    "print('GGML_ASSERT(false)', file=sys.stderr, flush=True); os.kill(os.getpid(), {})"
)
HANGS = "import time; print('products of X', flush=True); time.sleep(60)"
# What a child does, and what the error says; signals end it with SIG..., where a system has them.
ENDS = [
    ("SIGSEGV", r"crashed \(SIGSEGV at products of X\): it was compiled .* CMAKE_ARGS="),
    ("SIGILL", r"crashed \(SIGILL at .* that this processor does not have, .*--no-c"),
    ("SIGABRT", r"could not be .* at products of X\): GGML_ASSERT\(false\); install it again"),
    ("SIGKILL", r"was killed \(products of X\); free some memory and try again"),
    (HANGS, r"did not end its test in time \(.*\); try again"),
    (
        "import nothing_of_this_name",
        r"could not .*exit status 1 at .*ModuleNotFoundError: No module named",
    ),
]


@pytest.mark.parametrize(("code", "expected"), ENDS)
def test_how_a_child_ends(code: str, expected: str, library: Path, tmp_path: Path) -> None:
    if code.startswith("SIG"):
        if sys.platform == "win32":
            pytest.skip("no signals")
        code = DIES.format(int(getattr(signal, code)))
    seconds = {"seconds": 0.5} if code == HANGS else {}
    with pytest.raises(BackendError, match=rf"ggml in .*libggml\.so {expected}"):
        check_library(library, tmp_path, child(code), **seconds)


@pytest.mark.skipif(sys.platform != "linux", reason="an exit status of its own")
@needs_compiler
def test_a_library_for_another_processor(tmp_path: Path) -> None:
    """The library contains an instruction that no processor has."""
    instruction = "udf #0" if platform.machine() == "aarch64" else "ud2"
    source = f'__attribute__((constructor)) void f(void) {{ __asm__("{instruction}"); }}'
    with pytest.raises(BackendError, match=r"\(SIGILL at loading it\): .* build it"):
        check_library(compiled(tmp_path, source), tmp_path)


@needs_library
def test_a_library_that_computes_wrong_numbers(tmp_path: Path) -> None:
    match = (
        r"computes wrong numbers on this processor: products of BF16, 1 vectors: .*build it again"
    )
    with pytest.raises(BackendError, match=match):
        check_library(installed_library(), tmp_path / "new", child(SPOILED))


def test_a_missing_library(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=r"libggml\.so: cannot be read \(No such file"):
        check_library(tmp_path / "libggml.so", tmp_path)


def test_a_child_that_cannot_be_started(library: Path, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="cannot start a process to test ggml"):
        check_library(library, tmp_path, ["/nothing/python"])
