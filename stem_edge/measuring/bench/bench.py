"""Speed and memory of a bundle, alone or against others, with the same tokens in one run.

Every engine runs in a process of its own. They take turns, A B A B, so that other load on the machine
meets all of them; ratios are medians over the rounds.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Unpack

import psutil

import stem_edge
from stem_edge.bundle.opening import Bundle
from stem_edge.errors import InputError, StemEdgeError
from stem_edge.measuring.bench.cases import Cases, Results, Run, T, Watched, peaks_of
from stem_edge.measuring.bench.figures import BenchSettings, Report
from stem_edge.measuring.bench.plain import plain
from stem_edge.measuring.bench.sequences import sequences
from stem_edge.measuring.bench.speculation import speculation
from stem_edge.measuring.bench.subjects import Common, load_options, make_subjects
from stem_edge.measuring.bench.workers import Subject, WorkerProcess
from stem_edge.measuring.memory.limits import ProcessLimits
from stem_edge.measuring.planning.bandwidth import measured as measured_bandwidth
from stem_edge.runtime.backends.engines import ENGINES, choose_engine
from stem_edge.runtime.backends.keywords import LoadKeywords
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.system.nvidia import nbytes_on_nvidia
from stem_edge.system.page_cache import drop_pages, make_cold
from stem_edge.system.user_folder import cpu_info
from stem_edge.units import parse_size

ROUNDS, LOADS = 5, 3
INTEGER_PRODUCTS = ("avx512_vnni", "avx_vnni", "amx_int8")
SPECULATION = "speculation"
SAMPLE_SECONDS = 0.1  # no shorter, because an engine that uses every core would be slowed down


def bench(
    bundle: str | Path,
    text: str | Path | None = None,
    *,
    cases: str | None = None,
    against: Iterable[str] = (),
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    rounds: int = ROUNDS,
    loads: int = LOADS,
    cold: bool = False,
    limit: int | str | None = None,
    notify: Callable[[str], None] = lambda what: None,
    **options: Unpack[LoadKeywords],
) -> Report:
    """Measure a bundle and its rivals, which takes minutes with a large one.

    text: a text in UTF-8, or token ids (.npy, .int32), which decide what rows are read, how often.
        Default: the text inside this package.
    cases: "1,2,4", so many sequences at a time, or "speculation". Default: one, without guesses.
    against: words of stem_edge.measuring.bench.subjects.AGAINST.
    prompt_tokens, new_tokens: of a round, or of each text of a case. Default: 512 and 128, or what
        context and text hold; those of cases say their own.
    rounds, loads: how often each subject decodes, and loads in a new process.
    cold: also load with no file in the page cache, and decode with no tables in it (Linux).
    limit: memory that each process gets, mapped files included, in a cgroup of its own (Linux). Each
        round then loads anew, with no file in the page cache, one subject after the other, and
        `loads` has no effect. What does not fit stands under `failed`, with its round, and has the
        figures of the rounds before.
    notify: called with what is going on, in words; at the end with an empty text.
    options: of stem_edge.load, for every subject whose name does not imply others. context_length
        is for every engine (default: the tokens of a round); "cpu" drops providers and their
        options, "resident" the limit of the device's memory.

    Raises InputError, BackendError, and what loading raises.
    """
    given = LoadOptions(**options)
    opened = given.open(bundle)
    engine = choose_engine(opened, given.engine)
    ENGINES[engine].check_lacks(vars(given))
    sizes = text, prompt_tokens, new_tokens, given.context_length
    made: Cases[Any]
    if cases is None:
        made = plain(opened, engine, given, sizes, cold=cold)
    else:
        made = _cases(opened, cases, sizes)
    settings = BenchSettings(
        text=made.source,
        prompt_tokens=made.prompt_tokens,
        new_tokens=made.new_tokens,
        rounds=rounds,
        loads=loads if cases is None else 0,
        context_length=given.context_length or made.tokens,
        threads=given.cpus,
        cold=cold,
        limit=None if limit is None else parse_size(limit),
        engine=engine,
        options=load_options(given),
    )
    _check(settings, opened.path, cases)
    try:
        notify("making what it is compared with")
        common = Common(opened, engine, settings.options)
        subjects = [made.loaded_as(each) for each in make_subjects(common, against)]
        found = Turns(settings, made, notify).run(subjects)
    finally:
        notify("")
    versions = {"stem-edge": stem_edge.__version__, "python": platform.python_version()}
    return Report(str(opened.path), machine(), versions, settings, **made.sum_up(found))


def _cases(
    bundle: Bundle, cases: str, sizes: tuple[str | Path | None, int | None, int | None, int | None]
) -> Cases[Any]:
    if cases == SPECULATION:
        return speculation(bundle, *sizes)
    try:
        counts = [int(number) for number in cases.split(",")]
    except ValueError:
        raise InputError(
            f"cases is {cases!r}; expected numbers of sequences, like 1,2,4, or {SPECULATION}"
        ) from None
    return sequences(bundle, counts, *sizes)


def _check(settings: BenchSettings, bundle: Path, cases: str | None) -> None:
    """Raise InputError for what cannot be measured, before minutes are spent on it."""
    for name, least in (("rounds", 1), ("loads", 0)):
        if (value := getattr(settings, name)) < least:
            raise InputError(f"{name} is {value}; expected at least {least}")
    if cases is not None and (settings.cold or settings.limit is not None):
        raise InputError("--cold and --limit are for one token at a time; leave them out")
    if settings.cold:
        drop_pages(())  # raises where that is not possible
    if settings.limit is not None:
        with _confined(Subject("bundle", "stem-edge", str(bundle)), settings.limit):
            pass


@dataclass(frozen=True)
class Turns(Generic[T]):
    """Runs rounds of cases on several subjects."""

    settings: BenchSettings
    cases: Cases[T]
    notify: Callable[[str], None]

    def run(self, subjects: list[Subject]) -> Results[T]:
        """Time the loads of each subject, then the rounds of all. Raises what a worker raises."""
        results = Results[T]({subject.name: Watched() for subject in subjects})
        if self.settings.limit is not None:
            self._limited(subjects, results, self.settings.limit)
            return results
        for subject in subjects:
            self._loads(subject, results.watched[subject.name])
        self._rounds(subjects, results)
        return results

    def _loads(self, subject: Subject, watched: Watched) -> None:
        """Time from nothing to a first token, in new processes, with a warm and a cold page cache."""
        if subject.options.get("resident"):
            return  # because each load would take minutes
        if not self.settings.loads and not self.settings.cold:
            return
        self.notify(f"loading {subject.name}")
        # First untimed, so that later loads find a prepared backbone and cached files.
        self._load(subject)
        watched.loads = [self._load(subject) for _ in range(self.settings.loads)]
        if self.settings.cold:
            drop_pages(subject.files())
            watched.cold_loads = [self._load(subject)]

    def _load(self, subject: Subject) -> tuple[float, float]:
        """Return the seconds until the model is loaded, and until the first token."""
        with _open(subject) as worker:
            loaded = self._start(worker)
            return loaded, loaded + worker.prefill(self.cases.short).seconds

    def _start(self, worker: WorkerProcess) -> float:
        imported, loaded = worker.load(self.settings.context_length, self.settings.threads)
        return imported.seconds + loaded.seconds

    def _rounds(self, subjects: list[Subject], results: Results[T]) -> None:
        """Run all subjects in turns; the last case first, which only warms up and is not counted."""
        names, rounds = list(self.cases.begin), self.settings.rounds
        with ExitStack() as stack:
            workers = {each.name: stack.enter_context(_open(each)) for each in subjects}
            for name, worker in workers.items():
                self.notify(f"loading {name}")
                self._start(worker)
            for turn in range(-1, rounds):
                if turn >= 0 and self.cases.bandwidth:
                    results.bandwidth.append(measured_bandwidth(self.settings.threads))
                these = names if turn >= 0 else names[-1:]
                for number, case in enumerate(these, 1):
                    self.notify(f"round {turn + 1} of {rounds}, {number} of {len(these)}")
                    run = self.cases.begin[case]()
                    for name, worker in workers.items():
                        seen = run(worker)
                        if turn >= 0:
                            results.add(name, case, seen)
            for name, worker in workers.items():
                watched = results.watched[name]
                watched.peaks, watched.about = peaks_of(worker.sampler), worker.about
                if worker.about:
                    watched.driver_says = nbytes_on_nvidia(worker.pid) or None

    def _limited(self, subjects: list[Subject], results: Results[T], limit: int) -> None:
        """Run one subject after the other, because pages count for who reads them first.

        What does not fit has failed, and keeps its earlier rounds. Raises the error of the bundle,
        which is the first subject, if that has none.
        """
        for subject in subjects:
            if subject.kind == "stem-edge":
                self.notify(f"preparing {subject.name}")
                self._load(subject)
        for turn in range(self.settings.rounds):
            ((case, begin),) = self.cases.begin.items()
            run = begin()
            for subject in (each for each in subjects if each.name not in results.failed):
                what = f"round {turn + 1} of {self.settings.rounds}: "
                self.notify(what + subject.name)
                watched = results.watched[subject.name]
                try:
                    seen = self._limited_round(subject, run, limit, watched)
                    results.add(subject.name, case, seen)
                except StemEdgeError as error:
                    if subject is subjects[0] and turn == 0:
                        raise
                    results.failed[subject.name] = what + str(error)

    def _limited_round(
        self, subject: Subject, run: Run[T], limit: int, watched: Watched
    ) -> dict[str, T]:
        make_cold(subject.files())
        with _confined(subject, limit) as worker:
            loaded, seen = self._start(worker), run(worker)
        watched.loads.append((loaded, loaded + worker.answers["prefill"].seconds))
        watched.peaks = peaks_of(worker.sampler)
        return seen


def _open(subject: Subject, confine: Callable[[int], None] = lambda pid: None) -> WorkerProcess:
    # Mappings are walked only when a phase begins and ends, because that would disturb the timing.
    return WorkerProcess(subject, SAMPLE_SECONDS, confine, kinds_interval=math.inf)


@contextmanager
def _confined(subject: Subject, limit: int) -> Iterator[WorkerProcess]:
    """Open a worker in its own cgroup. Raises InputError if a cgroup cannot be made."""

    def confine(pid: int) -> None:
        found = limits.confine_memory(pid, limit)
        if found.how != "real":
            raise InputError(
                f"limit is {found.words}; on Linux, root may make cgroups, and so may what "
                "systemd-run --user --scope starts"
            )

    with ProcessLimits(None) as limits, _open(subject, confine) as worker:
        yield worker


def machine() -> str:
    """Describe processor and memory, as far as the system tells."""
    told = cpu_info()
    name = " ".join(told.get("model name", [])) or platform.processor() or platform.machine()
    flags = told.get("flags", [])
    extras = ", ".join(extra for extra in INTEGER_PRODUCTS if extra in flags) or "no VNNI"
    memory = psutil.virtual_memory().total / 1e9
    return f"{os.cpu_count()} x {name}{f' ({extras})' if flags else ''}, {memory:.0f} GB"
