"""Cases that several subjects take in turns, and what is reported of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, TypeVar

from stem_edge.errors import InputError
from stem_edge.measuring.bench.figures import Settings
from stem_edge.measuring.bench.rounds import SAMPLE_SECONDS
from stem_edge.measuring.run.workers import Subject, WorkerProcess

MEASURED = ("stem-edge", "llama.cpp")  # kinds of subjects
# Names of figures and ratios.
RATE, FIRST, ALLOWED = "tokens_per_second", "first_token_seconds", "allowed_gain"
PLAIN, STEP = "plain", "step_of_"
Case = TypeVar("Case")
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


def check_subjects(subjects: Sequence[Subject]) -> None:
    """Raise InputError for subjects that only run one token at a time."""
    for subject in subjects:
        if subject.kind not in MEASURED:
            raise InputError(
                f"--against {subject.name}: only bundles and llama.cpp run several tokens in a step; "
                "leave it out"
            )


@contextmanager
def loaded(
    subjects: Sequence[Subject], settings: Settings, notify: Callable[[str], None]
) -> Iterator[dict[str, WorkerProcess]]:
    """Start a worker for each subject and load it; name -> worker."""
    with ExitStack() as stack:
        workers = {}
        for subject in subjects:
            notify(f"loading {subject.name}")
            worker = WorkerProcess(subject, SAMPLE_SECONDS, kinds_interval=math.inf)
            workers[subject.name] = stack.enter_context(worker)
            worker.load(settings.context_length, settings.threads)
        yield workers


def in_turns(
    cases: Sequence[Case],
    rounds: int,
    notify: Callable[[str], None],
    run: Callable[[Case, int], None],
) -> None:
    """Run all cases in each round; before them, the last one, as round -1, only warms up."""
    for turn in range(-1, rounds):
        these = cases if turn >= 0 else cases[-1:]
        for number, case in enumerate(these):
            notify(f"round {turn + 1} of {rounds}, {number + 1} of {len(these)}")
            run(case, turn)


def gathered(rounds: Sequence[Figures]) -> dict[str, list[float]]:
    """Turn the figures of each round into the rounds of each figure."""
    return {name: [each[name] for each in rounds] for name in rounds[0]}


def medians(figures: dict[str, list[float]]) -> Figures:
    """Return the median of each figure over the rounds."""
    return {name: median(values) for name, values in figures.items()}


def quotients(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """Divide figures of the same rounds."""
    return [mine / other for mine, other in zip(ours, others, strict=True)]
