"""Cases that several subjects take in turns, and what is reported of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, NamedTuple, TypeAlias

from stem_edge.measuring.bench.figures import PhasePeak, Settings
from stem_edge.measuring.bench.workers import Subject, WorkerProcess

# Names of figures and ratios.
RATE, FIRST, ALLOWED = "tokens_per_second", "first_token_seconds", "allowed_gain"
PLAIN, STEP = "plain", "step_of_"
Figures = dict[str, float]


@dataclass(frozen=True)
class Spread:
    """A figure in several rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of values, of which there is at least one."""
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


@dataclass(frozen=True)
class CaseReport:
    """Results of all subjects. Times in seconds, rates a second, sizes in bytes."""

    bundle: str
    machine: str
    versions: dict[str, str]
    settings: Settings
    results: list[CaseResult]

    def to_dict(self) -> dict[str, Any]:
        """Return all results, for JSON."""
        return asdict(self)


class Key(NamedTuple):
    """Key of what is measured in each round."""

    subject: str
    case: str
    way: str = ""


class Seen(NamedTuple):
    """Figures of a round, and the most probable tokens where they are compared."""

    figures: Figures
    own: Sequence[int] = ()


Run: TypeAlias = Callable[[WorkerProcess], dict[str, Seen]]  # returns way -> what was seen
Measured: TypeAlias = Mapping[Key, Sequence[Seen]]
Peaks: TypeAlias = Mapping[str, Mapping[str, PhasePeak]]  # subject -> phase -> memory


def as_it_is(subject: Subject) -> Subject:
    """Return the subject itself."""
    return subject


@dataclass(frozen=True)
class Cases:
    """Cases of one kind, and how their rounds are summed up."""

    # Name -> function that begins a round, and returns what each subject runs in it.
    begin: Mapping[str, Callable[[], Run]]
    results: Callable[[Measured, Peaks], Iterator[CaseResult]]
    source: str  # of the tokens, in words
    prompt_tokens: int
    new_tokens: int
    tokens: int  # for which the context must have room
    loaded_as: Callable[[Subject], Subject] = field(default=as_it_is)


def gathered(rounds: Sequence[Seen]) -> dict[str, list[float]]:
    """Turn the figures of each round into the rounds of each figure."""
    return {name: [each.figures[name] for each in rounds] for name in rounds[0].figures}


def medians(figures: dict[str, list[float]]) -> Figures:
    """Return the median of each figure over the rounds."""
    return {name: median(values) for name, values in figures.items()}


def quotients(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """Divide figures of the same rounds."""
    return [mine / other for mine, other in zip(ours, others, strict=True)]
