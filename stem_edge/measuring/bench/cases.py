"""Cases that several subjects take in turns, and their results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from stem_edge.measuring.bench.workers import Subject, WorkerProcess
from stem_edge.measuring.memory.sampler import MemorySampler

# Names of figures and ratios.
RATE, FIRST, ALLOWED = "tokens_per_second", "first_token_seconds", "allowed_gain"
PLAIN, STEP = "plain", "step_of_"
T = TypeVar("T")
Figures = dict[str, float]
Run: TypeAlias = Callable[[WorkerProcess], dict[str, T]]  # returns way -> what was seen


class Key(NamedTuple):
    """Key of the observations of each round."""

    subject: str
    case: str = ""
    way: str = ""


class Seen(NamedTuple):
    """Figures of a round, and the most probable tokens where they are compared."""

    figures: Figures
    own: Sequence[int] = ()


@dataclass(frozen=True)
class PhasePeak:
    """Memory of a process in one phase, in bytes."""

    unevictable: int  # anonymous memory and swap
    mapped: int | None  # from files of backbone and tables; None if the system does not tell
    kinds: dict[str, int]  # kind -> bytes at the end of the phase, for the kinds that are known


@dataclass
class Watched:
    """What was seen of one subject from outside."""

    loads: list[tuple[float, float]] = field(default_factory=list)  # seconds: loaded, first token
    cold_loads: list[tuple[float, float]] = field(default_factory=list)
    peaks: dict[str, PhasePeak] = field(default_factory=dict)  # by phase
    about: dict[str, str] = field(default_factory=dict)  # the accelerator
    driver_says: int | None = None  # bytes on NVIDIA GPUs after all rounds


@dataclass
class Results(Generic[T]):
    """What was found of all subjects."""

    watched: dict[str, Watched]
    found: dict[Key, list[T]] = field(default_factory=dict)  # in each round
    bandwidth: list[float] = field(default_factory=list)  # bytes a second, before each round
    failed: dict[str, str] = field(default_factory=dict)  # round and reason

    def add(self, subject: str, case: str, seen: Mapping[str, T]) -> None:
        """Add a round of a subject in a case."""
        for way, one in seen.items():
            self.found.setdefault(Key(subject, case, way), []).append(one)


@dataclass(frozen=True)
class Cases(Generic[T]):
    """Cases of one kind, and how their rounds are summed up."""

    # Name -> function that begins a round, and returns what each subject runs in it.
    begin: Mapping[str, Callable[[], Run[T]]]
    sum_up: Callable[[Results[T]], Mapping[str, Any]]  # returns fields of the report
    source: str  # of the tokens, in words
    prompt_tokens: int
    new_tokens: int
    tokens: int  # for which the context must have room
    loaded_as: Callable[[Subject], Subject] = field(default=lambda subject: subject)
    bandwidth: bool = False  # whether that of memory is timed before each round
    short: list[int] = field(default_factory=list)  # a prompt, for the time to a first token


@dataclass(frozen=True)
class Spread:
    """A figure in several rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more values."""
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"


@dataclass(frozen=True)
class CaseResult:
    """Figures of one way of running in one case: medians over the rounds, and ratios within them."""

    subject: str
    case: str
    way: str
    figures: Figures
    ratios: dict[str, Spread]
    rounds: dict[str, list[float]]  # figure -> its value in each round

    @classmethod
    def of(cls, key: Key, rounds: dict[str, list[float]], ratios: dict[str, Spread]) -> CaseResult:
        """Return the result of figures in each round."""
        medians = {name: median(values) for name, values in rounds.items()}
        return cls(*key, medians, ratios, rounds)


def gathered(rounds: Sequence[Seen]) -> dict[str, list[float]]:
    """Turn the figures of each round into the rounds of each figure."""
    return {name: [each.figures[name] for each in rounds] for name in rounds[0].figures}


def quotients(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """Divide figures of the same rounds."""
    return [mine / other for mine, other in zip(ours, others, strict=True)]


def peaks_of(sampler: MemorySampler) -> dict[str, PhasePeak]:
    """Return the peaks by phase. `mapped` is sampled more rarely than `unevictable`."""
    peaks = {}
    for name, phase in sampler.phases.items():
        samples = [sample.memory for sample in sampler.samples if sample.phase == name]
        mapped = [m.backbone + (m.tables or 0) for m in samples if m.backbone is not None]
        highest = max(mapped, default=None)
        peaks[name] = PhasePeak(phase.peak_unevictable, highest, phase.at_end.kinds())
    return peaks
