"""Test of the installed ggml in a child process, before this process uses it.

llama-cpp-python compiles ggml on the user's machine for the instructions that the processor
reports. If the system does not allow one of them (AMX in many virtual machines), a matrix product
kills the process instead of raising an error. A child process therefore uses the library first: it
multiplies with matrices of every type. A success is remembered in the user's cache folder until
the library, the processor, the system or stem-edge changes. A failure is not remembered, so that
a library that was installed again is tested at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import signal
from collections.abc import Sequence
from pathlib import Path

from stem_edge import __version__
from stem_edge.errors import BackendError
from stem_edge.files.disk import write_whole
from stem_edge.files.names import KEY_CHARS, cache_folder
from stem_edge.ggml.installed import AGAIN, REINSTALL, installed_library, library_files
from stem_edge.ggml.library import Ggml
from stem_edge.system.child import (
    SIGKILL,
    Ended,
    last_line,
    module_command,
    run_child,
    signal_name,
)
from stem_edge.system.processor import cpu_digest

# GGML_NATIVE would choose all that the processor reports. These flags fit any x86-64 of the last ten
# years, and mean nothing on ARM; docs/run.md lists more.
FLAGS = "-DGGML_NATIVE=OFF " + " ".join(
    f"-DGGML_{name}=ON" for name in ("AVX", "AVX2", "FMA", "F16C", "BMI2")
)
REBUILD = (
    f'build it again for any processor: CMAKE_ARGS="{FLAGS}" {REINSTALL} (OFF on one from before 2015; '
    "docs/run.md lists flags that make it faster)"
)

FORMAT = 6
FOLDER = "ggml"
TRIAL = "stem_edge.runtime.backends.ggml.library_trial"
REFUSED = 11  # exit status of TRIAL: its last line says what is wrong
TRIAL_SECONDS = 60.0  # one or two are enough on an idle machine


def checked_ggml(cache_dir: str | Path | None = None) -> Ggml:
    """Return the installed library after it was tested on this processor.

    `cache_dir` replaces the user's cache folder. Raises BackendError if the library is missing, of
    an unknown version, crashes, hangs or computes wrong numbers.
    """
    path = installed_library()
    check_library(path, cache_dir)
    return Ggml(path)


def check_library(
    path: Path,
    cache_dir: str | Path | None = None,
    command: Sequence[str] | None = None,
    seconds: float = TRIAL_SECONDS,
) -> None:
    """Test a library in a child process, unless it has passed before. Raises BackendError.

    command: starts the test, with `path` appended as the last argument; seconds: its time limit.
    """
    try:
        described = (FORMAT, *library_files(path), cpu_digest(), platform.release(), __version__)
    except OSError as error:
        raise BackendError(f"{path}: cannot be read ({error.strerror}); {AGAIN}") from error
    digest = hashlib.sha256(repr(described).encode()).hexdigest()[:KEY_CHARS]
    passed = cache_folder(cache_dir) / FOLDER / digest
    if passed.exists():
        return
    try:
        ended = run_child([*(command or module_command(TRIAL)), str(path)], seconds)
    except OSError as error:
        raise BackendError(
            f"cannot start a process to test ggml in {path} ({error.strerror}); allow stem-edge to "
            "start a Python interpreter once for this test"
        ) from error
    if ended.status != 0:
        raise BackendError(_failure(path, ended))
    # Not an error, because a cache that cannot be written only means another trial next time.
    with contextlib.suppress(OSError):
        passed.parent.mkdir(parents=True, exist_ok=True)
        write_whole(passed, b"")


def _failure(path: Path, ended: Ended) -> str:
    """Return the error message for a library test that failed."""
    said, step, status = last_line(ended.stderr), last_line(ended.stdout), ended.status
    if status is None:
        return f"ggml in {path} did not end its test in time ({step}); try again when the machine is less busy, or {REBUILD}"
    if status == REFUSED:
        return said
    if status == -SIGKILL:
        return f"the test of ggml in {path} was killed ({step}); free some memory and try again"
    if not ended.crashed or status == -signal.SIGABRT:
        return (
            f"ggml in {path} could not be tested (exit status {status} at {step}): {said}; {AGAIN}"
        )
    return (
        f"ggml in {path} crashed ({signal_name(status)} at {step}): it was compiled for "
        "instructions that this processor does not have, or that the system does not allow, such "
        f"as AMX in many virtual machines; {REBUILD}"
    )
