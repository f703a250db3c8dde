"""Speed and memory of a bundle, alone or against others, with the same tokens in one run.

Every engine runs in a process of its own; they take turns, A B A B, so that what else goes on in
the machine meets all of them, and ratios are medians over the rounds.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import stem_edge
from stem_edge.bundle import TABLES, Bundle, open_bundle
from stem_edge.errors import InputError
from stem_edge.measuring.accelerator import driver_nbytes
from stem_edge.measuring.bench_figures import (
    BenchReport,
    Measured,
    Settings,
    figures_of,
    peaks_of,
    ratios,
    token_nbytes,
)
from stem_edge.measuring.bench_machine import bandwidth, machine
from stem_edge.measuring.bench_subjects import (
    Common,
    load_options,
    make_subjects,
    on_device,
)
from stem_edge.measuring.page_cache import drop_pages, files_in
from stem_edge.measuring.workers import Subject, WorkerProcess, prepared_folders
from stem_edge.measuring.workload import DEFAULT_TEXT, make_workload, read_ids
from stem_edge.runtime.engines import choose_backbone
from stem_edge.runtime.machine import usable_cpus
from stem_edge.runtime.options import DeviceKeywords, EngineChoice, Providers
from stem_edge.runtime.user_cache import cache_folder

ROUNDS, LOADS = 5, 3
SHORT_PROMPT = 16  # tokens; of the time from nothing to a first token
SAMPLE_SECONDS = 0.1  # oftener, it takes time from an engine that uses every core
WORK_FOLDER = "bench"


def bench(
    bundle: str | Path,
    text: str | Path | None = None,
    *,
    against: Iterable[str] = (),
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    rounds: int = ROUNDS,
    loads: int = LOADS,
    context_length: int | None = None,
    threads: int | None = None,
    slots: int | None = None,
    memory: int | str | None = None,
    emulate_flash: str | None = None,
    cold: bool = False,
    engine: EngineChoice = "auto",
    repack: bool = False,
    providers: Providers = None,
    provider_libraries: Mapping[str, str | Path] | None = None,
    device_memory: int | str | None = None,
    host_slots: int | None = None,
    work: str | Path | None = None,
    notify: Callable[[str], None] = lambda what: None,
) -> BenchReport:
    """Measure a bundle and what it is compared with. Takes minutes with a large one.

    text: a text in UTF-8, or token ids (.npy, .int32): which rows are read, and how often, decides.
        Default: the text inside this package.
    against: see bench_subjects.AGAINST.
    prompt_tokens, new_tokens: of a round. Default: 512 and 128, or what context and text hold.
    rounds, loads: how often each subject decodes, and loads in a new process.
    context_length: of every engine. Default: the tokens of a round.
    threads: Default: the CPUs that this process may use.
    slots, memory, emulate_flash: as of stem_edge.load, for every stem-edge subject. Default: a row
        cache of 1 % of the vocabulary.
    cold: also load with no file in the page cache, and decode with no tables in it (Linux).
    engine, repack: as of stem_edge.load, for every subject that does not say another.
    providers, provider_libraries, device_memory, host_slots: the same; "cpu" is without them, and
        "resident" has no limit of the device's memory.
    work: where models for llama.cpp are kept. Default: in the user's cache folder.
    notify: gets what is going on, in words; an empty text at the end.

    Raises InputError, BackendError, and what loading raises.
    """
    opened = open_bundle(bundle)
    source = DEFAULT_TEXT if text is None else Path(text)
    load = make_workload(opened, text, prompt_tokens, new_tokens, context_length)
    chosen = choose_backbone(opened, engine)
    if repack and chosen != "ggml":
        raise InputError("repack belongs to ggml, and this runs on onnxruntime; leave it out")
    device: DeviceKeywords = {
        "providers": providers,
        "provider_libraries": provider_libraries,
        "device_memory": device_memory,
        "host_slots": host_slots,
    }
    settings = Settings(
        text=load.source,
        prompt_tokens=len(load.prompt),
        new_tokens=len(load.following),
        rounds=rounds,
        loads=loads,
        context_length=context_length or load.tokens,
        threads=usable_cpus() if threads is None else threads,
        cold=cold,
        engine=chosen,
        options=load_options(opened, slots, memory, emulate_flash, repack=repack, device=device),
    )
    _check(settings)
    folder = cache_folder(None) / WORK_FOLDER if work is None else Path(work)
    common = Common(opened, chosen, settings.options, settings.threads, folder)
    try:
        notify("making what it is compared with")
        subjects = make_subjects(common, against)
        return _Bench(opened, read_ids(source, opened), settings, notify).run(subjects)
    finally:
        notify("")


def _check(settings: Settings) -> None:
    for name, least in (("rounds", 1), ("loads", 0), ("threads", 1)):
        value = getattr(settings, name)
        if value < least:
            raise InputError(f"{name} is {value}; expected at least {least}")
    if settings.cold and not drop_pages(()):
        raise InputError(
            "cold is not possible here: this system lets no program take files out of the page "
            "cache (Linux does); leave it out"
        )


class _Bench:
    """One run over all subjects."""

    def __init__(
        self, bundle: Bundle, ids: list[int], settings: Settings, notify: Callable[[str], None]
    ) -> None:
        self._bundle, self._ids, self._settings = bundle, ids, settings
        self._notify = notify

    def run(self, subjects: list[Subject]) -> BenchReport:
        """Loads, then rounds."""
        measured = {subject.name: Measured() for subject in subjects}
        for subject in subjects:
            self._notify(f"loading {subject.name}")
            self._loads(subject, measured[subject.name])
        return self._report(measured, self._rounds(subjects, measured))

    def _loads(self, subject: Subject, measured: Measured) -> None:
        """Time from nothing to a first token, in new processes: files in the page cache, or not."""
        if subject.kind == "torch" or subject.options.get("resident"):
            return  # minutes that nobody waits for
        self._load(subject)  # prepares the backbone and reads files, which later loads find
        measured.loads = [self._load(subject) for _ in range(self._settings.loads)]
        if self._settings.cold:
            path = Path(subject.path)
            drop_pages([path] if path.is_file() else files_in(path))
            for folder in _mapped(subject):
                drop_pages(files_in(folder))
            measured.cold_loads = [self._load(subject)]

    def _load(self, subject: Subject) -> tuple[float, float]:
        """Seconds until it is loaded, and until the first token."""
        prompt = self._ids[: min(SHORT_PROMPT, self._settings.prompt_tokens)]
        with _open(subject) as worker:
            loaded = self._start(worker)
            return loaded, loaded + worker.prefill(prompt).seconds

    def _start(self, worker: WorkerProcess) -> float:
        settings = self._settings
        imported, loaded = worker.load(settings.context_length, settings.threads)
        return imported.seconds + loaded.seconds

    def _rounds(self, subjects: list[Subject], measured: dict[str, Measured]) -> list[float]:
        """All subjects alive at once, in turns; the memory bandwidth before each round."""
        rates, rounds = [], self._settings.rounds
        with ExitStack() as stack:
            workers = {each.name: stack.enter_context(_open(each)) for each in subjects}
            for name, worker in workers.items():
                self._notify(f"loading {name}")
                self._start(worker)
            on_cpu = not on_device(self._settings.options)
            for turn in range(-1, rounds):  # the first one warms up and does not count
                self._notify(f"round {turn + 1} of {rounds}")
                if turn >= 0 and on_cpu:
                    rates.append(bandwidth(self._settings.threads))
                for name, worker in workers.items():
                    into = measured[name] if turn >= 0 else Measured()
                    self._turn(into, worker, turn)
                    measured[name].last = into.last
            for name, worker in workers.items():
                measured[name].peaks = peaks_of(worker.sampler)
                measured[name].about = worker.about
                measured[name].driver_says = driver_nbytes(worker.pid) if worker.about else None
        return rates

    def _turn(self, measured: Measured, worker: WorkerProcess, turn: int) -> None:
        settings, tables = self._settings, Path(worker.subject.path) / TABLES
        span = settings.prompt_tokens + settings.new_tokens
        start = (turn % (len(self._ids) // span)) * span
        ids = self._ids[start : start + span]
        if settings.cold:
            drop_pages(files_in(tables))
        prefill = worker.prefill(ids[: settings.prompt_tokens])
        if settings.cold:
            drop_pages(files_in(tables))
        decode = worker.decode(ids[settings.prompt_tokens :])
        measured.add(settings.prompt_tokens, prefill, decode)

    def _report(self, measured: dict[str, Measured], rates: list[float]) -> BenchReport:
        settings = self._settings
        subjects = {name: figures_of(each) for name, each in measured.items()}
        position = settings.prompt_tokens + settings.new_tokens // 2
        nbytes = token_nbytes(self._bundle, settings.engine, position)
        mine = next(iter(measured.values())).median_step
        reached = [step * nbytes / rate for step, rate in zip(mine, rates, strict=bool(rates))]
        return BenchReport(
            bundle=str(self._bundle.path),
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
    # Mappings are walked when a phase begins and ends, not while it is timed.
    return WorkerProcess(subject, _mapped(subject), SAMPLE_SECONDS, kinds_interval=math.inf)


def _mapped(subject: Subject) -> tuple[Path, ...]:
    if subject.kind != "stem-edge" or subject.options.get("engine") != "onnxruntime":
        return ()
    return prepared_folders(subject.path, None)
