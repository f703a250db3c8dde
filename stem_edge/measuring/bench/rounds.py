"""The rounds of a bench: all engines in turns, or each in little memory and from cold files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stem_edge.bundle.manifest import TABLES
from stem_edge.errors import InputError, StemEdgeError
from stem_edge.measuring.bench.figures import Measured, Round, Settings, peaks_of
from stem_edge.measuring.bench.subjects import on_device
from stem_edge.measuring.bench.workers import Subject, WorkerProcess
from stem_edge.measuring.memory.gpu import device_nbytes
from stem_edge.measuring.memory.limits import Limits
from stem_edge.measuring.memory.page_cache import drop_pages, files_in, make_cold
from stem_edge.measuring.planning.bandwidth import measured as measured_bandwidth

SHORT_PROMPT = 16  # tokens, for the time from nothing to a first token
SAMPLE_SECONDS = 0.1  # no shorter, because an engine that uses every core would be slowed down


@dataclass
class Results:
    """Measurements of each subject, by its name."""

    measured: dict[str, Measured]
    bandwidth: list[float] = field(default_factory=list)  # bytes a second, before each round
    failed: dict[str, str] = field(default_factory=dict)  # round and reason


@dataclass(frozen=True)
class Turns:
    """Runs rounds of several subjects over token ids of a text."""

    ids: list[int]
    settings: Settings
    notify: Callable[[str], None]

    def run(self, subjects: list[Subject]) -> Results:
        """Time the loads of each subject, then the rounds of all. Raises what a worker raises."""
        results = Results({subject.name: Measured() for subject in subjects})
        if self.settings.limit is not None:
            self._limited(subjects, results, self.settings.limit)
            return results
        for subject in subjects:
            self.notify(f"loading {subject.name}")
            self._loads(subject, results.measured[subject.name])
        self._rounds(subjects, results)
        return results

    def _loads(self, subject: Subject, measured: Measured) -> None:
        """Time from nothing to a first token, in new processes, with a warm and a cold page cache."""
        if subject.options.get("resident"):
            return  # because each load would take minutes
        if not self.settings.loads and not self.settings.cold:
            return
        # First untimed, so that later loads find a prepared backbone and cached files.
        self._load(subject)
        measured.loads = [self._load(subject) for _ in range(self.settings.loads)]
        if self.settings.cold:
            drop_pages(subject.files())
            measured.cold_loads = [self._load(subject)]

    def _load(self, subject: Subject) -> tuple[float, float]:
        """Return the seconds until the model is loaded, and until the first token."""
        prompt = self.ids[: min(SHORT_PROMPT, self.settings.prompt_tokens)]
        with _open(subject) as worker:
            loaded = self._start(worker)
            return loaded, loaded + worker.prefill(prompt).seconds

    def _start(self, worker: WorkerProcess) -> float:
        imported, loaded = worker.load(self.settings.context_length, self.settings.threads)
        return imported.seconds + loaded.seconds

    def _rounds(self, subjects: list[Subject], results: Results) -> None:
        """Run all subjects in turns, and measure the memory bandwidth before each round."""
        measured, rounds = results.measured, self.settings.rounds
        counted: dict[str, dict[str, float]] = {}  # subject -> counters after its last round
        with ExitStack() as stack:
            workers = {each.name: stack.enter_context(_open(each)) for each in subjects}
            for name, worker in workers.items():
                self.notify(f"loading {name}")
                self._start(worker)
            on_cpu = not on_device(self.settings.options)
            for turn in range(-1, rounds):  # the first turn only warms up and is not counted
                self.notify(f"round {turn + 1} of {rounds}")
                if turn >= 0 and on_cpu:
                    results.bandwidth.append(measured_bandwidth(self.settings.threads))
                for name, worker in workers.items():
                    done = self._round(worker, turn, counted.get(name, {}))
                    counted[name] = done.decode.counters
                    measured[name].rounds += [done] if turn >= 0 else []
            for name, worker in workers.items():
                measured[name].peaks = peaks_of(worker.sampler)
                measured[name].about = worker.about
                if worker.about:
                    measured[name].driver_says = device_nbytes(worker.pid, "cuda") or None

    def _limited(self, subjects: list[Subject], results: Results, limit: int) -> None:
        """Run one subject after the other, because pages count for who reads them first.

        What does not fit has failed, and keeps its earlier rounds. Raises the error of the bundle,
        which is the first subject, if that has none.
        """
        for subject in subjects:
            if subject.kind == "stem-edge":
                self.notify(f"preparing {subject.name}")
                self._load(subject)
        for turn in range(self.settings.rounds):
            for subject in (each for each in subjects if each.name not in results.failed):
                what = f"round {turn + 1} of {self.settings.rounds}: "
                self.notify(what + subject.name)
                try:
                    self._limited_round(subject, turn, results.measured[subject.name], limit)
                except StemEdgeError as error:
                    if subject is subjects[0] and turn == 0:
                        raise
                    results.failed[subject.name] = what + str(error)

    def _limited_round(self, subject: Subject, turn: int, measured: Measured, limit: int) -> None:
        make_cold(subject.files())
        with _confined(subject, limit) as worker:
            loaded = self._start(worker)
            done = self._round(worker, turn, {})
        measured.rounds.append(done)
        measured.loads.append((loaded, loaded + done.prefill.seconds))
        measured.peaks = peaks_of(worker.sampler)

    def _round(self, worker: WorkerProcess, turn: int, before: dict[str, float]) -> Round:
        prompt_tokens, tables = self.settings.prompt_tokens, Path(worker.subject.path) / TABLES
        span = prompt_tokens + self.settings.new_tokens
        start = (turn % (len(self.ids) // span)) * span
        ids = self.ids[start : start + span]
        if self.settings.cold:
            drop_pages(files_in(tables))
        prefill = worker.prefill(ids[:prompt_tokens])
        if self.settings.cold:
            drop_pages(files_in(tables))
        return Round(prompt_tokens, before, prefill, worker.decode(ids[prompt_tokens:]))


def _open(subject: Subject, confine: Callable[[int], None] = lambda pid: None) -> WorkerProcess:
    # Mappings are walked only when a phase begins and ends, because that would disturb the timing.
    return WorkerProcess(subject, SAMPLE_SECONDS, confine, kinds_interval=math.inf)


def check_limit(bundle: Path, limit: int) -> None:
    """Raise InputError if a worker's memory cannot be limited here."""
    with _confined(Subject("bundle", "stem-edge", str(bundle)), limit):
        pass


@contextmanager
def _confined(subject: Subject, limit: int) -> Iterator[WorkerProcess]:
    """Open a worker in a cgroup of its own. Raises InputError if none can be made."""

    def confine(pid: int) -> None:
        found = limits.confine_memory(pid, limit)
        if found.how != "real":
            raise InputError(
                f"limit is {found.words}; on Linux, root may make cgroups, and so may what "
                "systemd-run --user --scope starts"
            )

    with Limits(None) as limits, _open(subject, confine) as worker:
        yield worker
