"""What a bench measured, as figures: of each subject, and of the bundle against the others."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from stem_edge.bundle import Bundle, EngineName
from stem_edge.footprint import SLOT_BOOKKEEPING_NBYTES, footprint_of
from stem_edge.measuring.sampler import Sampler
from stem_edge.measuring.workers import Answer

COUNTED = ("bytes_read", "stall_seconds", "hits", "misses")
RATES = ("prefill", "decode", "median_step")  # of Figures.rounds


@dataclass(frozen=True)
class PhasePeak:
    """Memory of a process in one phase, in bytes."""

    unevictable: int  # anonymous memory and swap
    mapped: int | None  # from the files of backbone and tables; None where the system is silent
    kinds: dict[str, int]  # kind -> bytes when the phase ended, of the kinds that are known


@dataclass
class Measured:
    """One subject while it is measured; a list entry a round."""

    prefill: list[float] = field(default_factory=list)  # tokens a second
    decode: list[float] = field(default_factory=list)  # over all steps of a round
    median_step: list[float] = field(default_factory=list)  # by the median step of a round
    first: list[float] = field(default_factory=list)  # seconds from prompt to first token
    counters: list[dict[str, float]] = field(default_factory=list)  # a decode step, on average
    loads: list[tuple[float, float]] = field(default_factory=list)  # seconds: loaded, first token
    cold_loads: list[tuple[float, float]] = field(default_factory=list)
    peaks: dict[str, PhasePeak] = field(default_factory=dict)  # by phase

    def add(self, prompt_tokens: int, prefill: Answer, decode: Answer) -> None:
        """One round."""
        steps, before, after = decode.steps, prefill.counters, decode.counters
        self.prefill.append(prompt_tokens / prefill.seconds)
        self.first.append(prefill.seconds)
        self.decode.append(len(steps) / sum(steps))
        self.median_step.append(1 / median(steps))
        counted = {n: (after[n] - before[n]) / len(steps) for n in COUNTED if n in after}
        self.counters.append(counted)


@dataclass(frozen=True)
class Figures:
    """Of one subject: medians over the rounds; None where nothing is counted or was measured."""

    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    median_step_tokens_per_second: float
    first_token_seconds: float
    load_seconds: float | None
    load_to_first_token_seconds: float | None
    cold_load_to_first_token_seconds: float | None
    flash_bytes_per_token: float | None
    stall_seconds_per_token: float | None
    hit_rate: float | None
    peak_memory: dict[str, PhasePeak]
    rounds: dict[str, list[float]]  # tokens a second


@dataclass(frozen=True)
class Ratio:
    """How many times as fast the bundle is, over the rounds."""

    against: str
    rate: str  # of RATES
    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Settings:
    """How a bench was run."""

    text: str  # where the tokens come from, in words
    prompt_tokens: int
    new_tokens: int
    rounds: int
    loads: int
    context_length: int
    threads: int
    cold: bool
    engine: EngineName
    options: dict[str, Any]  # others of stem_edge.load


@dataclass(frozen=True)
class BenchReport:
    """Everything that a bench found. Sizes in bytes, rates a second."""

    bundle: str
    machine: str
    versions: dict[str, str]
    settings: Settings
    subjects: dict[str, Figures]  # the first one is the bundle
    ratios: list[Ratio]
    bandwidth: list[
        float
    ]  # of memory, before each round: it changes where others share the machine
    token_nbytes: int
    bandwidth_reached: float  # of what the bandwidth allows by the bytes of a token

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def figures_of(measured: Measured) -> Figures:
    """All figures of a subject."""
    counters = measured.counters
    return Figures(
        prefill_tokens_per_second=median(measured.prefill),
        decode_tokens_per_second=median(measured.decode),
        median_step_tokens_per_second=median(measured.median_step),
        first_token_seconds=median(measured.first),
        load_seconds=_median([load for load, _ in measured.loads]),
        load_to_first_token_seconds=_median([first for _, first in measured.loads]),
        cold_load_to_first_token_seconds=_median([first for _, first in measured.cold_loads]),
        flash_bytes_per_token=_median([c["bytes_read"] for c in counters if c]),
        stall_seconds_per_token=_median([c["stall_seconds"] for c in counters if c]),
        hit_rate=_hit_rate(counters),
        peak_memory=measured.peaks,
        rounds={rate: getattr(measured, rate) for rate in RATES},
    )


def ratios(subjects: dict[str, Figures]) -> list[Ratio]:
    """The first subject against each of the others."""
    (_, bundle), *others = subjects.items()
    found = []
    for name, other in others:
        for rate in RATES:
            pairs = zip(bundle.rounds[rate], other.rounds[rate], strict=True)
            values = [mine / its for mine, its in pairs]
            found.append(Ratio(name, rate, median(values), min(values), max(values)))
    return found


def peaks_of(sampler: Sampler) -> dict[str, PhasePeak]:
    """Peaks by phase. Kinds are sampled more rarely than totals: so is `mapped`."""
    peaks = {}
    for name, phase in sampler.phases.items():
        samples = [sample.memory for sample in sampler.samples if sample.phase == name]
        mapped = [m.backbone + (m.tables or 0) for m in samples if m.backbone is not None]
        highest = max(mapped, default=None)
        peaks[name] = PhasePeak(phase.peak_unevictable, highest, phase.at_end.kinds())
    return peaks


def token_nbytes(bundle: Bundle, engine: EngineName, position: int) -> int:
    """Bytes that a decode step at this position reads from memory."""
    footprint = footprint_of(bundle.manifest, engine)
    record = 0 if footprint.tables is None else footprint.slot_nbytes - SLOT_BOOKKEEPING_NBYTES
    return footprint.step_nbytes + footprint.kv_nbytes(position) + record


def _hit_rate(counters: list[dict[str, float]]) -> float | None:
    hits = sum(c.get("hits", 0) for c in counters)
    uses = hits + sum(c.get("misses", 0) for c in counters)
    return hits / uses if uses else None


def _median(values: list[float]) -> float | None:
    return median(values) if values else None
