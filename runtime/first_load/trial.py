"""Trial of a bundle that is new on this machine: a child process loads its tokenizer first.

The library that reads tokenizers is native code. A file that makes it crash, loop or take all
memory kills the process without an exception. So a child process does the first load, within
limits, and stem_edge.bundle.verdicts keeps the verdict. Graphs need no trial, because this version
builds them, but the child also measures whether a small graph for prompts is exact on this processor.

A failure that is not the bundle's fault is not kept, such as a child that the system killed to free
memory. One that may be the fault of a busy machine, a timeout, is kept for an hour. Errors of
stem-edge itself are not kept either, since loading the file raises them again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stem_edge import errors
from stem_edge.bundle.keeping import check_place, keep_verdict
from stem_edge.bundle.manifest import BACKBONES, TOKENIZER, TOKENIZER_CONFIG
from stem_edge.bundle.opening import Bundle
from stem_edge.bundle.prefill_check import PROBE_TOKENS, tried
from stem_edge.bundle.verdicts import Verdict, Verdicts
from stem_edge.errors import BackendError, StemEdgeError
from stem_edge.files.strict_json import one_line
from stem_edge.graph.formats import EngineName
from stem_edge.progress import Progress
from stem_edge.runtime.first_load.trial_worker import DONE, NO_MEMORY
from stem_edge.system.child import (
    REFUSED,
    SIGKILL,
    Ended,
    last_line,
    module_command,
    run_steps,
    signal_name,
)
from stem_edge.system.memory import memory_limit, return_freed_memory
from stem_edge.units import format_size, parse_size

WORKER = "stem_edge.runtime.first_load.trial_worker"
# Weights are copied once, and once more while they are packed; rows lie in slots, and quantized
# ones may be widened to float32.
BASE_NBYTES, COPIES_OF_WEIGHTS, COPIES_OF_ROWS = 1 << 30, 3, 8
# A process with a small tokenizer has half of this, because libraries ask for more than they use.
FEWEST_NBYTES = 128 << 20
# Loading takes a second for several hundred megabytes, computing on a slow board much longer.
CPU_SECONDS, CPU_SECONDS_PER_GB = 6, 120
# Longer than the processor time, so that an endless loop meets that limit first; but a small file
# that hangs must not keep users waiting much longer than ten seconds.
STEP_SECONDS, STEP_SECONDS_PER_GB = 8, 180
START_SECONDS = 60.0  # to import the libraries from a slow memory card
# Signals that a file can cause in native code; others come from elsewhere.
CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL", "SIGTRAP", "SIGSYS")
NOT_TRIED = "report this, or load it with trial=False if you trust its source"
DISTRUST = (
    "do not load it unless you trust its source: copy or export it again, or upgrade the engine, "
    "and try again with: stem-edge verify "
)
MORE = "allow more memory, or load it with trial=False if you trust its source"
TOO_SLOW = "try again on a less busy machine, in an hour, or at once with: stem-edge verify "
MAX_MESSAGE_CHARS = 2000
UNSEEN_NBYTES = 256 << 20  # hashed too fast for a progress bar


class TrialLimits(NamedTuple):
    """Limits of a trial."""

    memory_nbytes: int
    cpu_seconds: int
    step_seconds: float  # wall time
    asked: bool = False  # the memory is what there is, not what the bundle may need

    @classmethod
    def of(cls, records: Verdicts, memory: int | str | None = None) -> TrialLimits:
        """Return the limits for a bundle, by the size of the tried files, within `memory`."""
        manifest = records.bundle.manifest
        graphs = not BACKBONES[records.engine].prompts or tried(manifest)
        names = records.native_files() if graphs else [TOKENIZER, TOKENIZER_CONFIG]
        nbytes, tables = records.nbytes(names), manifest.tables
        rows = PROBE_TOKENS * tables.record_nbytes if tables is not None and graphs else 0
        needed = BASE_NBYTES + COPIES_OF_WEIGHTS * nbytes + COPIES_OF_ROWS * rows
        there = max(FEWEST_NBYTES, memory_limit() if memory is None else parse_size(memory))
        cpu = CPU_SECONDS + CPU_SECONDS_PER_GB * nbytes // 10**9
        step = STEP_SECONDS + STEP_SECONDS_PER_GB * nbytes / 10**9
        return cls(min(needed, there), cpu, step, there < needed)


class _Failed(NamedTuple):
    """A failed trial."""

    reason: str
    kept: bool = True  # False if it says more about this machine than about the bundle
    advice: str = ""
    certain: bool = True  # False if a busy machine may be the reason


def try_first(
    bundle: Bundle,
    engine: EngineName,
    cache_dir: str | Path | None = None,
    progress: bool | None = None,
    *,
    memory: int | str | None = None,
    anew: bool = False,
    command: Sequence[str] | None = None,
    limits: TrialLimits | None = None,
) -> Verdict:
    """Return the good verdict on a bundle, after a trial if no verdict is known.

    Its files are then those of its manifest, and it loads.

    memory: limit of the trial's process; default: all that the machine or its cgroup has. anew: try even if a verdict is known. command: replaces the worker, with its arguments.
    Raises BundleError, BackendError, and any StemEdgeError that the files themselves cause.
    """
    records = Verdicts(bundle, engine, cache_dir)
    hashed = records.nbytes(records.hashed_files())
    show = progress if hashed > UNSEEN_NBYTES else False
    with Progress(hashed, "checking files", show) as bar:
        check_place(records, bar.advance, anew=anew)
    verdict = None if anew else records.verdict()
    if verdict is None:
        limits = limits or TrialLimits.of(records, memory)
        with Progress(0, "trying it in another process, once", show):
            found = _run(records, command or module_command(WORKER), limits)
        if not isinstance(found, _Failed):
            return keep_verdict(records, prefill_from_decode=found)
        if found.kept:
            keep_verdict(records, found.reason, certain=found.certain)
    elif not verdict.reason:
        return verdict
    else:
        found = _Failed(one_line(verdict.reason), certain=verdict.until is None)
    advice = found.advice or (DISTRUST if found.certain else TOO_SLOW) + str(bundle.path)
    raise BackendError(f"{bundle.path}: {found.reason}; {advice}")


def _run(records: Verdicts, command: Sequence[str], limits: TrialLimits) -> _Failed | float | None:
    """Run the worker. Raises BackendError, and the StemEdgeError that the worker raised.

    Returns the failure, or the divergence of the prefill graph in nats, if that was measured.
    """
    bundle = records.bundle
    arguments = [str(bundle.path.resolve()), records.engine]
    arguments += [str(limits.memory_nbytes), str(limits.cpu_seconds)]
    arguments += [] if bundle.tables is None else [bundle.tables]
    try:
        ended = run_steps([*command, *arguments], START_SECONDS, limits.step_seconds)
    except OSError as error:
        raise BackendError(
            f"{bundle.path}: cannot start {command[0]} for its trial ({error.strerror}); free some "
            "memory, or load it with trial=False if you trust its source"
        ) from error
    return_freed_memory()  # else the memory of the threads that read its output stays
    done, *diverges = last_line(ended.stdout).split()
    if ended.status == 0 and done == DONE:
        return float(diverges[0]) if diverges else None
    if ended.status == REFUSED:
        raise refusal(ended.stderr)
    return _failure(ended, limits)


def _failure(ended: Ended, limits: TrialLimits) -> _Failed:
    """Return the failure that the end of a worker stands for."""
    most = format_size(limits.memory_nbytes)
    step, said, kept = _plain(ended.stdout), _plain(ended.stderr), not _is_limited(limits)
    if ended.status is None:
        if not ended.stdout:  # it did not even open the bundle
            reason = f"the process for its trial did not start within {START_SECONDS:g} s"
            return _Failed(reason, kept=False, certain=False)
        reason = f"its trial did not finish a step within {limits.step_seconds:.3g} s (at {step})"
        return _Failed(reason, certain=False)
    if ended.status == NO_MEMORY:
        reason = f"its trial needed more than {most} of memory (at {step})"
        return _Failed(reason, kept and not limits.asked, MORE if limits.asked else "")
    name = signal_name(ended.status) if ended.crashed else f"exit status {ended.status}"
    if name == "SIGXCPU":
        seconds = f"{limits.cpu_seconds} s of processor time"
        return _Failed(f"its trial took more than {seconds} (at {step})")
    if name in CRASHES or (ended.crashed and sys.platform == "win32"):
        return _Failed(f"it crashed the process of its trial ({name} at {step}: {said})", kept)
    if ended.status == -SIGKILL:
        reason = f"its trial, which may take {most} of memory, was killed (at {step})"
        return _Failed(reason, kept=False, advice=f"free some memory, or {MORE}")
    reason = f"its trial could not be completed ({name} at {step}: {said})"
    return _Failed(reason, kept=False, advice=NOT_TRIED)


def refusal(output: bytes) -> StemEdgeError:
    """Return the error that a worker printed last, as a StemEdgeError of the same class."""
    name, _, message = _plain(output, MAX_MESSAGE_CHARS).partition(": ")
    kind = getattr(errors, name, BackendError)
    if isinstance(kind, type) and issubclass(kind, StemEdgeError):
        return kind(message)
    return BackendError(message)


def _plain(output: bytes, most: int = 200) -> str:
    """Return the last line, escaped if it has control characters."""
    line = last_line(output)[:most]
    return line if line.isprintable() else ascii(line)


def _is_limited(limits: TrialLimits) -> bool:
    """Return whether this process has memory limits that the trial may have met instead of ours."""
    if sys.platform == "win32":
        return False
    import resource

    names = [getattr(resource, name, None) for name in ("RLIMIT_AS", "RLIMIT_DATA")]
    found = [resource.getrlimit(number)[0] for number in names if number is not None]
    return any(
        value != resource.RLIM_INFINITY and value < 2 * limits.memory_nbytes for value in found
    )
