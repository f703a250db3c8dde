"""ggml for this process, after another one has tried it.

llama-cpp-python compiles ggml on the user's machine, for instructions that the processor announces.
Where the system does not grant one of them (AMX in many virtual machines), a product ends the
process instead of raising an error; so the first use is that of a child process, which runs small
models on ggml and in numpy. A good verdict is kept in the user's cache folder and counts until the
library, the processor, the system or stem-edge is another. A bad one is never kept: whoever installs
the library again wants to know at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec

from stem_edge import __version__
from stem_edge.errors import BackendError
from stem_edge.files import disk
from stem_edge.files.whole_file import write_whole
from stem_edge.ggml.library import AGAIN, REINSTALL, Ggml, installed_library
from stem_edge.system.child import (
    SIGKILL,
    WINDOWS_CRASH,
    Ended,
    last_line,
    module_command,
    run_child,
    signal_name,
)
from stem_edge.system.user_folder import KEY_CHARS, cache_folder, cpu_announces, cpu_digest

# Flag -> what Linux calls it. ggml's kernels for AMX are left out: they save nothing here.
X86 = {
    "GGML_AVX": "avx",
    "GGML_AVX2": "avx2",
    "GGML_FMA": "fma",
    "GGML_F16C": "f16c",
    "GGML_BMI2": "bmi2",
    "GGML_AVX_VNNI": "avx_vnni",
    "GGML_AVX512": "avx512vl",
    "GGML_AVX512_VBMI": "avx512vbmi",
    "GGML_AVX512_VNNI": "avx512_vnni",
    "GGML_AVX512_BF16": "avx512_bf16",
}
# All that x86-64 of the last ten years has; where the system does not tell, it is assumed.
USUAL = ("avx", "avx2", "fma", "f16c", "bmi2")
ARM = "GGML_CPU_ARM_ARCH"

FORMAT = 2
FOLDER = "ggml"
MAX_NBYTES = 1 << 16
TRIAL = "stem_edge.runtime.backends.ggml.trial"
# Its exit status: a wrong result, a library that Ggml refuses. (3 is an abort on Windows.)
DIFFERS, REFUSED = 10, 11
TRIAL_SECONDS = 60.0  # it takes one or two where nothing else runs


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The last line of a trial that ended well."""

    repack: bool  # whether products of rearranged matrices were right, too


class Verdict(Told, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The same as it is kept."""

    format: int
    library: str


def checked_ggml(cache_dir: str | Path | None = None) -> Ggml:
    """The installed library, once it is known to compute what it should on this processor.

    `cache_dir`: instead of the user's cache folder. Raises BackendError: it is missing, of an
    unknown version, crashes, hangs or computes something else.
    """
    path = installed_library()
    return Ggml(path, repack=check_library(path, cache_dir).repack)


def check_library(
    path: Path,
    cache_dir: str | Path | None = None,
    command: Sequence[str] | None = None,
    seconds: float = TRIAL_SECONDS,
) -> Verdict:
    """The verdict on a library: the one kept, else of a trial now. Raises BackendError.

    `command`, by default TRIAL in a process of its own, gets the library's path as a last argument,
    and so many seconds to end.
    """
    try:
        kept_in = verdict_file(cache_folder(cache_dir), path)
    except OSError as error:
        raise BackendError(f"{path}: cannot be read ({error.strerror}); {AGAIN}") from error
    verdict = read_verdict(kept_in)
    if verdict is None:
        verdict = _try(path, command or module_command(TRIAL), seconds)
        # A folder that cannot be written only means another trial next time.
        with contextlib.suppress(OSError):
            kept_in.parent.mkdir(parents=True, exist_ok=True)
            write_whole(kept_in, msgspec.json.encode(verdict))
    return verdict


def verdict_file(root: Path, library: Path) -> Path:
    """Where the verdict on this library, processor and stem-edge is kept. Raises OSError."""
    system = (cpu_digest(), platform.release(), __version__)
    digest = hashlib.sha256(repr((FORMAT, *library_files(library), system)).encode()).hexdigest()
    return root / FOLDER / f"{digest[:KEY_CHARS]}.json"


def library_files(library: Path) -> tuple[str, list[tuple[str, int, int]]]:
    """Where a library is, and name, size and time of its files. Raises OSError."""
    found = [library, *library.parent.glob("*ggml*")]
    stats = {path.name: path.stat() for path in found}
    files = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items())
    return str(library.resolve()), files


def read_verdict(path: Path) -> Verdict | None:
    """A verdict that was kept; None if there is none, or it is damaged or of another format."""
    try:
        verdict = msgspec.json.decode(disk.read_file(path, MAX_NBYTES), type=Verdict)
    except (OSError, ValueError, RecursionError):  # msgspec's are ValueErrors
        return None
    return verdict if verdict.format == FORMAT else None


def _try(path: Path, command: Sequence[str], seconds: float) -> Verdict:
    """Run the child. Raises BackendError."""
    try:
        ended = run_child([*command, str(path)], seconds)
    except OSError as error:
        raise BackendError(
            f"cannot start {command[0]} to test ggml in {path} ({error.strerror}); stem-edge needs "
            "to start a Python interpreter for that once"
        ) from error
    if ended.status is None:
        raise BackendError(
            f"ggml in {path} did not end a test of its kernels within {seconds:g} s "
            f"({last_line(ended.stdout)}); try again when less runs here, or {rebuild()}"
        )
    if ended.status:
        raise BackendError(_failure(path, ended.status, ended))
    said = last_line(ended.stdout)
    try:
        told = msgspec.json.decode(said, type=Told)
    except ValueError:  # msgspec's are
        raise BackendError(f"{path}: the test of ggml ended with {said!r}; {AGAIN}") from None
    return Verdict(format=FORMAT, library=str(path), repack=told.repack)


def _failure(path: Path, status: int, ended: Ended) -> str:
    """The message for a child that did not end well."""
    said, step = last_line(ended.stderr), last_line(ended.stdout)
    if status == REFUSED:
        return said
    if status == DIFFERS:
        return f"ggml in {path} computes wrong numbers on this processor: {said}; {rebuild()}"
    if status == -signal.SIGABRT:
        return f"ggml in {path} gave up in a test of its kernels ({step}): {said}; {AGAIN}"
    if 0 < status < WINDOWS_CRASH:
        return f"ggml in {path} could not be tested, exit status {status}: {said}; {AGAIN}"
    if status == -SIGKILL:
        return f"the test of ggml in {path} was killed ({step}); free some memory and try again"
    return (
        f"ggml in {path} crashed ({signal_name(status)} at {step}): it was compiled for instructions "
        "that this processor does not have, or announces without granting them, as AMX in many "
        f"virtual machines; {rebuild()}"
    )


def cmake_flags() -> str:
    """Flags for this processor, for CMAKE_ARGS: one for each group of instructions that it has.

    Left to itself, ggml is compiled for all that the processor of that moment announces.
    """
    flags = ["-DGGML_NATIVE=OFF"]
    if platform.machine().lower() in ("aarch64", "arm64"):
        dots = "+dotprod" * cpu_announces("asimddp") + "+i8mm" * cpu_announces("i8mm")
        return " ".join([*flags, f"-D{ARM}=armv8.2-a{dots}"] if dots else flags)
    told = cpu_announces("sse2")  # as every x86-64 does
    for flag, word in X86.items():
        there = cpu_announces(word) if told else word in USUAL
        flags.append(f"-D{flag}={'ON' if there else 'OFF'}")
    return " ".join(flags)


def rebuild() -> str:
    """What to do about a library that was compiled for the wrong instructions."""
    flags = cmake_flags()
    further = " (with AVX512 OFF, if it still fails)" if "AVX512=ON" in flags else ""
    return f'build it again for this processor: CMAKE_ARGS="{flags}" {REINSTALL}{further}'
