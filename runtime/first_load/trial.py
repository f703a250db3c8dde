"""A tokenizer that is new on this machine is tried in a process of its own before this one loads it.

The library that reads it is native code. A file that drives it into a crash, an endless loop or all
of the memory ends the process, and no exception says why. So the first load lets another process do
it, within limits; stem_edge.bundle.verdicts keeps what came out. Graphs need no trial: this version builds
them. But whether the one for prompts is exact on this processor is measured there, too.
What is not the bundle's fault is not kept, such as a process that the system ended for want of memory;
that it did not end in time, which may be the fault of a busy machine, is kept for an hour. A file that
is refused with an error of ours is refused by it again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stem_edge import errors
from stem_edge.bundle.manifest import Bundle
from stem_edge.bundle.prefill_check import PROBE_TOKENS
from stem_edge.bundle.verdicts import Records, Verdict
from stem_edge.errors import BackendError, StemEdgeError
from stem_edge.files.strict_json import one_line
from stem_edge.graph.formats import EngineName
from stem_edge.progress import Progress
from stem_edge.runtime.first_load.trial_worker import DONE, NO_MEMORY, REFUSED
from stem_edge.system.child import SIGKILL, Ended, last_line, module_command, run_steps, signal_name
from stem_edge.system.memory import return_freed_memory
from stem_edge.units import format_size

WORKER = "stem_edge.runtime.first_load.trial_worker"
# Weights are copied once, and once more while they are packed; rows lie in slots, and one may be
# widened to float32.
BASE_NBYTES, COPIES_OF_WEIGHTS, COPIES_OF_ROWS = 1 << 30, 3, 8
# A second loads several hundred megabytes; computing with them on a slow board takes much longer.
CPU_SECONDS, CPU_SECONDS_PER_GB = 6, 120
# More than the processor's, so that a loop is known for one; and machines are busy, but nobody is to
# wait much longer than ten seconds for a small file that hangs.
STEP_SECONDS, STEP_SECONDS_PER_GB = 8, 180
START_SECONDS = 60.0  # to import the libraries, from a slow card
# What a file can do to native code; other signals come from elsewhere.
CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS")
NOT_TRIED = "report this, or load it with trial=False if you trust its source"
DISTRUST = (
    "do not load it unless you trust its source: copy or export it again, or upgrade what runs it, "
    "and try again with: stem-edge verify "
)
TOO_SLOW = "try again when less runs here, in an hour, or at once with: stem-edge verify "
MAX_MESSAGE_CHARS = 2000
UNSEEN_NBYTES = 256 << 20  # what is hashed before anybody wants a bar


class Limits(NamedTuple):
    """What a trial may take."""

    memory_nbytes: int
    cpu_seconds: int
    step_seconds: float  # by the clock

    @classmethod
    def of(cls, records: Records) -> Limits:
        """For a bundle."""
        nbytes, tables = records.nbytes(records.native_files()), records.bundle.manifest.tables
        rows = PROBE_TOKENS * tables.record_nbytes if tables is not None else 0
        memory = BASE_NBYTES + COPIES_OF_WEIGHTS * nbytes + COPIES_OF_ROWS * rows
        cpu = CPU_SECONDS + CPU_SECONDS_PER_GB * nbytes // 10**9
        return cls(memory, cpu, STEP_SECONDS + STEP_SECONDS_PER_GB * nbytes / 10**9)


class _Failed(NamedTuple):
    """How a trial ended that did not end well."""

    reason: str
    kept: bool = True  # or it says more about this machine, now, than about the bundle
    advice: str = ""
    certain: bool = True  # or a machine that was busy may be the reason


def try_first(
    bundle: Bundle,
    engine: EngineName,
    cache_dir: str | Path | None = None,
    progress: bool | None = None,
    *,
    anew: bool = False,
    command: Sequence[str] | None = None,
    limits: Limits | None = None,
) -> Verdict:
    """Try a bundle, unless a verdict on it is known; returns the verdict, which is good.

    Its files are those of its manifest then, and it loads.

    anew: whatever is known. command: instead of the worker; it gets the worker's arguments.
    Raises BundleError, BackendError, and whatever error of ours the files themselves raise.
    """
    records = Records(bundle, engine, cache_dir)
    hashed = records.nbytes(records.hashed_files())
    show = progress if hashed > UNSEEN_NBYTES else False
    with Progress(hashed, "checking files", show) as bar:
        records.check_place(bar.advance, anew=anew)
    verdict = None if anew else records.verdict()
    if verdict is None:
        limits = limits or Limits.of(records)
        found = _run(records, command or module_command(WORKER), limits)
        if not isinstance(found, _Failed):
            return records.keep_verdict(prefill_from_decode=found)
        if found.kept:
            records.keep_verdict(found.reason, certain=found.certain)
    elif not verdict.reason:
        return verdict
    else:
        found = _Failed(one_line(verdict.reason), certain=verdict.until is None)
    advice = found.advice or (DISTRUST if found.certain else TOO_SLOW) + str(bundle.path)
    raise BackendError(f"{bundle.path}: {found.reason}; {advice}")


def _run(records: Records, command: Sequence[str], limits: Limits) -> _Failed | float | None:
    """Try it in a process of its own. Raises BackendError, and what the worker raised of ours.

    Returns how it failed, or how far its prefill graph diverges here, if that was measured.
    """
    bundle = records.bundle
    arguments = [str(bundle.path.resolve()), records.engine]
    arguments += [str(limits.memory_nbytes), str(limits.cpu_seconds)]
    try:
        ended = run_steps([*command, *arguments], START_SECONDS, limits.step_seconds)
    except OSError as error:
        raise BackendError(
            f"{bundle.path}: cannot start {command[0]} to try it first ({error.strerror}); free some "
            "memory, or load it with trial=False if you trust its source"
        ) from error
    return_freed_memory()  # what the threads took that read its output
    done, *diverges = last_line(ended.stdout).split()
    if ended.status == 0 and done == DONE:
        return float(diverges[0]) if diverges else None
    if ended.status == REFUSED:
        raise _refusal(ended)
    return _failure(ended, limits)


def _failure(ended: Ended, limits: Limits) -> _Failed:
    """What the end of a worker says."""
    step, said, kept = _plain(ended.stdout), _plain(ended.stderr), not _is_limited(limits)
    if ended.status is None:
        if not ended.stdout:  # it did not come as far as the bundle
            reason = f"a process that would try it did not start within {START_SECONDS:g} s"
            return _Failed(reason, kept=False, certain=False)
        reason = f"a trial of it did not end a step within {limits.step_seconds:.3g} s (at {step})"
        return _Failed(reason, certain=False)
    if ended.status == NO_MEMORY:
        most = format_size(limits.memory_nbytes)
        return _Failed(f"a trial of it needed more than {most} of memory (at {step})", kept)
    name = signal_name(ended.status) if ended.crashed else f"exit status {ended.status}"
    if name == "SIGXCPU":
        seconds = f"{limits.cpu_seconds} s of processor time"
        return _Failed(f"a trial of it took more than {seconds} (at {step})")
    if name in CRASHES or (ended.crashed and sys.platform == "win32"):
        return _Failed(f"it crashed a process that tried it first ({name} at {step}: {said})", kept)
    if ended.status == -SIGKILL:
        reason = f"a trial of it was killed (at {step})"
        return _Failed(reason, kept=False, advice="free some memory and try again")
    reason = f"it could not be tried in a process of its own ({name} at {step}: {said})"
    return _Failed(reason, kept=False, advice=NOT_TRIED)


def _refusal(ended: Ended) -> StemEdgeError:
    """The error of ours that the worker ended with."""
    name, _, message = _plain(ended.stderr, MAX_MESSAGE_CHARS).partition(": ")
    kind = getattr(errors, name, BackendError)
    if isinstance(kind, type) and issubclass(kind, StemEdgeError):
        return kind(message)
    return BackendError(message)


def _plain(output: bytes, most: int = 200) -> str:
    """The last line, with nothing in it that moves a terminal."""
    line = last_line(output)[:most]
    return line if line.isprintable() else ascii(line)


def _is_limited(limits: Limits) -> bool:
    """Whether this process has bounds of its own that a trial may have met instead of ours."""
    if sys.platform == "win32":
        return False
    import resource

    names = [getattr(resource, name, None) for name in ("RLIMIT_AS", "RLIMIT_DATA")]
    found = [resource.getrlimit(number)[0] for number in names if number is not None]
    return any(
        value != resource.RLIM_INFINITY and value < 2 * limits.memory_nbytes for value in found
    )
