"""Speed and memory of a bundle, alone or against others, with the same tokens in one run.

Every engine runs in a process of its own. They take turns, A B A B, so that other load on the machine
meets all of them; ratios are medians over the rounds.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Unpack

import numpy as np
import psutil

import stem_edge
from stem_edge.bundle.manifest import TABLES, Bundle, open_bundle
from stem_edge.errors import InputError
from stem_edge.measuring.bench.figures import (
    BenchReport,
    Measured,
    Round,
    Settings,
    figures_of,
    peaks_of,
    ratios,
    token_nbytes,
)
from stem_edge.measuring.memory.gpu import device_nbytes
from stem_edge.measuring.memory.page_cache import drop_pages, files_in
from stem_edge.measuring.run.subjects import Common, load_options, make_subjects, on_device
from stem_edge.measuring.run.workers import Subject, WorkerProcess
from stem_edge.measuring.run.workload import DEFAULT_TEXT, make_workload, read_ids
from stem_edge.runtime.backends.engines import choose_backbone
from stem_edge.runtime.backends.options import LoadKeywords, LoadOptions
from stem_edge.system.memory import available_memory
from stem_edge.system.user_folder import cache_folder, cpu_info

ROUNDS, LOADS = 5, 3
SHORT_PROMPT = 16  # tokens, for the time from nothing to a first token
SAMPLE_SECONDS = 0.1  # no shorter, because an engine that uses every core would be slowed down
WORK_FOLDER = "bench"
INTEGER_PRODUCTS = ("avx512_vnni", "avx_vnni", "amx_int8")
BANDWIDTH_NBYTES = 1 << 29  # for each thread: far more than a cache holds
BANDWIDTH_SHARE = 0.25  # of the available memory, for all threads together


def bench(
    bundle: str | Path,
    text: str | Path | None = None,
    *,
    against: Iterable[str] = (),
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    rounds: int = ROUNDS,
    loads: int = LOADS,
    cold: bool = False,
    work: str | Path | None = None,
    notify: Callable[[str], None] = lambda what: None,
    **options: Unpack[LoadKeywords],
) -> BenchReport:
    """Measure a bundle and what it is compared with, which takes minutes with a large one.

    text: a text in UTF-8, or token ids (.npy, .int32), which decide what rows are read, how often.
        Default: the text inside this package.
    against: words of stem_edge.measuring.run.subjects.AGAINST.
    prompt_tokens, new_tokens: of a round. Default: 512 and 128, or what context and text hold.
    rounds, loads: how often each subject decodes, and loads in a new process.
    cold: also load with no file in the page cache, and decode with no tables in it (Linux).
    work: folder for the models of llama.cpp. Default: in the user's cache folder.
    notify: called with what is going on, in words; at the end with an empty text.
    options: of stem_edge.load, for every subject whose name does not imply others. context_length
        is for every engine (default: the tokens of a round); "cpu" drops providers and their
        options, "resident" the limit of the device's memory.

    Raises InputError, BackendError, and what loading raises.
    """
    opened, given = open_bundle(bundle), LoadOptions(**options)
    work_load = make_workload(opened, text, prompt_tokens, new_tokens, given.context_length)
    chosen = choose_backbone(opened, given.engine)
    if given.repack and chosen != "ggml":
        raise InputError(
            "repack is for ggml, and this bench runs on onnxruntime; leave it out or choose ggml"
        )
    settings = Settings(
        text=work_load.source,
        prompt_tokens=len(work_load.prompt),
        new_tokens=len(work_load.following),
        rounds=rounds,
        loads=loads,
        context_length=given.context_length or work_load.tokens,
        threads=given.cpus,
        cold=cold,
        engine=chosen,
        options=load_options(given),
    )
    _check(settings)
    folder = cache_folder(None) / WORK_FOLDER if work is None else Path(work)
    common = Common(opened, chosen, settings.options, settings.threads, folder)
    try:
        notify("making what it is compared with")
        subjects = make_subjects(common, against)
        ids = read_ids(DEFAULT_TEXT if text is None else Path(text), opened)
        return _Bench(opened, ids, settings, notify).run(subjects)
    finally:
        notify("")


def _check(settings: Settings) -> None:
    for name, value, least in (("rounds", settings.rounds, 1), ("loads", settings.loads, 0)):
        if value < least:
            raise InputError(f"{name} is {value}; expected at least {least}")
    if settings.cold:
        drop_pages(())  # raises where that is not possible


@dataclass(frozen=True)
class _Bench:
    """A run over all subjects."""

    bundle: Bundle
    ids: list[int]
    settings: Settings
    notify: Callable[[str], None]

    def run(self, subjects: list[Subject]) -> BenchReport:
        """Time the loads of each subject, then the rounds of all."""
        measured = {subject.name: Measured() for subject in subjects}
        for subject in subjects:
            self.notify(f"loading {subject.name}")
            self._loads(subject, measured[subject.name])
        return self._report(measured, self._rounds(subjects, measured))

    def _loads(self, subject: Subject, measured: Measured) -> None:
        """Time from nothing to a first token, in new processes, with a warm and a cold page cache."""
        if subject.kind == "torch" or subject.options.get("resident"):
            return  # because each load would take minutes
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

    def _rounds(self, subjects: list[Subject], measured: dict[str, Measured]) -> list[float]:
        """Run all subjects in turns; return the memory bandwidth before each round."""
        rates, rounds = [], self.settings.rounds
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
                    rates.append(bandwidth(self.settings.threads))
                for name, worker in workers.items():
                    done = self._round(worker, turn, counted.get(name, {}))
                    counted[name] = done.decode.counters
                    measured[name].rounds += [done] if turn >= 0 else []
            for name, worker in workers.items():
                measured[name].peaks = peaks_of(worker.sampler)
                measured[name].about = worker.about
                if worker.about:
                    measured[name].driver_says = device_nbytes(worker.pid, "cuda") or None
        return rates

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

    def _report(self, measured: dict[str, Measured], rates: list[float]) -> BenchReport:
        settings = self.settings
        subjects = {name: figures_of(each) for name, each in measured.items()}
        position = settings.prompt_tokens + settings.new_tokens // 2
        nbytes = token_nbytes(self.bundle, settings.engine, position)
        mine = next(iter(subjects.values())).rounds["median_step"]
        reached = [step * nbytes / rate for step, rate in zip(mine, rates, strict=bool(rates))]
        return BenchReport(
            bundle=str(self.bundle.path),
            machine=machine(),
            versions={"stem-edge": stem_edge.__version__, "python": platform.python_version()},
            settings=settings,
            subjects=subjects,
            ratios=ratios(subjects),
            bandwidth=rates,
            token_nbytes=nbytes,
            bandwidth_reached=median(reached) if reached else None,
        )


def _open(subject: Subject) -> WorkerProcess:
    # Mappings are walked only when a phase begins and ends, because that would disturb the timing.
    return WorkerProcess(subject, SAMPLE_SECONDS, kinds_interval=math.inf)


def machine() -> str:
    """Describe processor and memory, as far as the system tells."""
    told = cpu_info()
    name = " ".join(told.get("model name", [])) or platform.processor() or platform.machine()
    flags = told.get("flags", [])
    extras = ", ".join(extra for extra in INTEGER_PRODUCTS if extra in flags) or "no VNNI"
    memory = psutil.virtual_memory().total / 1e9
    return f"{os.cpu_count()} x {name}{f' ({extras})' if flags else ''}, {memory:.0f} GB"


def bandwidth(threads: int) -> float:
    """Measure how many bytes a second all threads together read from memory."""
    left = int(BANDWIDTH_SHARE * available_memory())
    nbytes = min(BANDWIDTH_NBYTES, left // threads) // 8 * 8
    arrays = [np.ones(nbytes // 8, np.uint64) for _ in range(threads)]
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(3):
            started = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, arrays))
            rates.append(threads * nbytes / (time.perf_counter() - started))
    return max(rates)
