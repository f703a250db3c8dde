"""One run of a bundle in a process of its own: time and memory, phase by phase."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from stem_edge.bundle.footprint import footprint_of
from stem_edge.bundle.manifest import BACKBONES, TABLES
from stem_edge.bundle.opening import Bundle
from stem_edge.bundle.prefill_check import crowding
from stem_edge.errors import InputError
from stem_edge.measuring.bench.cases import Watched
from stem_edge.measuring.bench.figures import Figures, Round, figures_of
from stem_edge.measuring.bench.subjects import bundle_subject, load_options
from stem_edge.measuring.bench.workers import WorkerAnswer, WorkerProcess
from stem_edge.measuring.memory.device_profiles import Device, find_device
from stem_edge.measuring.memory.limits import Limit, ProcessLimits
from stem_edge.measuring.memory.sampler import TOTALS_SECONDS, PhaseMemory, Sample
from stem_edge.measuring.planning.bandwidth import measured
from stem_edge.measuring.planning.predict import Prediction, expect_run
from stem_edge.measuring.planning.target import fit_on_device
from stem_edge.measuring.workload import Workload, make_workload
from stem_edge.runtime.backends.engine import EngineLoader
from stem_edge.runtime.backends.engines import ENGINES, choose_engine, loaders
from stem_edge.runtime.backends.keywords import LoadKeywords
from stem_edge.runtime.backends.memory_plan import Preparing
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.system.memory import usable_cpus
from stem_edge.system.nvidia import nbytes_on_nvidia
from stem_edge.system.page_cache import cached_nbytes, make_cold

LONGEST_INTERVAL = 10.0


@dataclass(frozen=True)
class Phase:
    """A phase of the run. Sizes in bytes."""

    name: str
    seconds: float
    tokens: int  # processed by the model
    memory: PhaseMemory
    cached_backbone: int | None  # in the system's page cache at the end, of the bundle's files
    cached_tables: int | None
    kv_cache: int
    row_cache: int
    device: int | None  # memory of a GPU; None if the driver does not tell


@dataclass(frozen=True)
class Measurement:
    """Results of one run. Sizes in bytes, times in seconds."""

    bundle: str
    engine: str
    system: str
    threads: int
    context_length: int
    options: dict[str, Any]  # other options of stem_edge.load that differ from its defaults
    workload: Workload
    device: Device | None
    limits: list[Limit]
    phases: list[Phase]
    samples: list[Sample]  # memory by kind over time
    definitions: Mapping[str, str]
    interval: float  # between two samples of the totals
    preparing: Preparing | None  # what a first load takes; None if it was done before
    prepared_seconds: float  # spent on it before the run
    round: Round  # the worker's answers
    hit_curve: dict[int, float]  # slots -> hit rate while decoding, simulated
    prediction: Prediction
    runs_on: dict[str, str]  # provider, device, driver; empty if no provider was asked for

    def phase(self, name: str) -> Phase:
        """Return a phase by its name: start, import, load, prefill or decode."""
        return next(phase for phase in self.phases if phase.name == name)

    @property
    def speed(self) -> Figures:
        """Speed, flash and hit rate."""
        return figures_of([self.round], Watched())

    @property
    def steps(self) -> list[float]:
        """Seconds of each decode step."""
        return self.round.decode.steps

    @property
    def counters(self) -> dict[str, float]:
        """Counters of the engine at the end."""
        return self.round.decode.counters

    @property
    def decode_tokens_per_second(self) -> float:
        """Speed by the median step, which other load on the machine hardly changes."""
        return self.speed.median_step_tokens_per_second

    @property
    def hit_rate(self) -> float | None:
        """Hits of the row cache while decoding, as a share; None for a dense model."""
        return self.speed.hit_rate

    @property
    def peak(self) -> int:
        """Peak of the process's anonymous memory and swap."""
        return max(phase.memory.peak_unevictable for phase in self.phases)

    @property
    def mapped(self) -> int | None:
        """Mapped pages of the backbone's files at the end; None if the system does not tell."""
        return self.phases[-1].memory.at_end.backbone

    @property
    def sampler_saw(self) -> float | None:
        """The greatest resident size that was sampled over the kernel's own high-water mark."""
        shares = [
            phase.memory.peak_resident / phase.memory.kernel_peak_resident
            for phase in self.phases
            if phase.memory.kernel_peak_resident
        ]
        return min(shares) if shares else None


def measure(
    bundle: str | Path,
    text: str | Path | None = None,
    *,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    device: str | None = None,
    cold: bool = False,
    interval: float = TOTALS_SECONDS,
    notify: Callable[[str], None] = lambda what: None,
    **options: Unpack[LoadKeywords],
) -> Measurement:
    """Load a bundle, process a prompt and decode, in a process of its own that is watched from here.

    text: a text or token ids (stem_edge.measuring.workload). The first tokens are the prompt,
        those after it are fed one by one as in decoding. Default: the text inside this package.
    device: name of a device (stem_edge.measuring.memory.device_profiles) within whose limits to run, as far
        as this machine can enforce them.
    cold: take the bundle's files out of the page cache first; always done for a device.
    interval: seconds between two samples of the process's totals.
    notify: called with what is going on, in words; at the end with an empty text.
    options: of stem_edge.load.

    Raises what load raises, InputError, and MemoryPlanError if the bundle cannot run on the device.
    """
    given = LoadOptions(**options)
    opened = given.open(bundle)
    if not 0 < interval <= LONGEST_INTERVAL:
        raise InputError(
            f"interval is {interval} seconds; expected more than 0, at most {LONGEST_INTERVAL:g}"
        )
    stated = None if device is None else find_device(device)
    workload = make_workload(opened, text, prompt_tokens, new_tokens, given.context_length)
    engine = choose_engine(opened, given.engine)
    flash = given.emulate_flash or (stated.flash if stated else None)
    reads = opened.manifest.tables is not None and not given.resident
    try:
        with ProcessLimits(stated, flash if reads else None) as limits:
            chosen = replace(
                given,
                engine=engine,
                emulate_flash=flash,
                context_length=given.context_length or workload.tokens,
                threads=given.threads or limits.cpus or usable_cpus(),
            )
            footprint = footprint_of(opened.manifest, ENGINES[engine].backbone)
            if stated and given.prefill_graph is None and crowding(footprint, stated.memory):
                chosen = replace(chosen, prefill_graph=False)  # as a load there would find
            loader = loaders(opened, engine, chosen)[0]
            if stated is not None and given.memory is None and given.slots is None:
                fitting = fit_on_device(
                    opened, loader.needs, stated.memory, chosen.contexts(opened)[0]
                )
                chosen = replace(chosen, memory=fitting)
            run = _Run(opened, engine, workload, chosen, loader, limits, notify)
            return run.measure(interval, cold=cold or stated is not None)
    finally:
        notify("")


@dataclass(frozen=True)
class _Run:
    """A run of a worker through all phases."""

    bundle: Bundle
    engine: str
    workload: Workload
    options: LoadOptions
    loader: EngineLoader
    limits: ProcessLimits
    notify: Callable[[str], None]

    def measure(self, interval: float, *, cold: bool) -> Measurement:
        """Do the unmeasured work, run, and put the results together."""
        self.notify("preparing")
        preparing = self.loader.needs(self.options.contexts(self.bundle)[0]).preparing
        started = time.perf_counter()
        self.loader.prepare(None)
        prepared = time.perf_counter() - started
        device, options = self.limits.device, self.options
        room = None if device is None else device.memory
        predict_at, curve = expect_run(self.bundle, self.loader.needs, self.workload, options, room)
        before, phases = self._bandwidth(), list[Phase]()
        kept = load_options(options)
        subject = bundle_subject("bundle", self.bundle, self.engine, kept)
        if cold:
            make_cold(subject.files())
        with WorkerProcess(subject, interval, self.limits.confine) as worker:
            done = self._phases(worker, phases)
        return Measurement(
            bundle=str(self.bundle.path),
            engine=self.engine,
            system=f"{platform.system()} {platform.release()}, {platform.machine()}",
            threads=options.cpus,
            context_length=options.contexts(self.bundle)[0],
            options=kept,
            workload=self.workload,
            device=device,
            limits=self.limits.limits,
            phases=phases,
            samples=worker.sampler.samples,
            definitions=worker.sampler.reader.definitions,
            interval=interval,
            preparing=preparing,
            prepared_seconds=prepared,
            round=done,
            hit_curve=curve,
            # Measured twice, because others may begin or stop to use the machine meanwhile.
            prediction=predict_at(max(before, self._bandwidth())),
            runs_on=worker.about,
        )

    def _bandwidth(self) -> float:
        self.notify("timing this machine's memory")
        return measured(self.options.cpus)

    def _phases(self, worker: WorkerProcess, phases: list[Phase]) -> Round:
        """Run all phases in order, and append them to `phases`."""
        files, own = worker.subject.files(), BACKBONES[ENGINES[self.engine].backbone].files
        made = worker.subject.prepared_folders()
        backbone = [path for path in files if path.name in own or path.parent in made]
        tables = [path for path in files if TABLES in path.parts]

        def add(name: str, answer: WorkerAnswer, tokens: int = 0) -> WorkerAnswer:
            phases.append(
                Phase(
                    name,
                    answer.seconds,
                    tokens,
                    worker.sampler.phases[name],
                    cached_nbytes(backbone),
                    cached_nbytes(tables),
                    int(answer.counters.get("kv_nbytes", 0)),
                    int(answer.counters.get("row_cache_nbytes", 0)),
                    0 if self.options.providers is None else nbytes_on_nvidia(worker.pid),
                )
            )
            return answer

        prompt, following = self.workload.prompt, self.workload.following
        self.notify("loading")
        add("start", worker.start())
        imported, loaded = worker.load(self.options.contexts(self.bundle)[0], self.options.cpus)
        add("import", imported)
        add("load", loaded)
        self.notify(f"prefill of {len(prompt)} tokens")
        prefill = add("prefill", worker.prefill(prompt), len(prompt))
        self.notify(f"decoding {len(following)} tokens")
        decode = add("decode", worker.decode(following), len(following))
        return Round(len(prompt), loaded.counters, prefill, decode)
