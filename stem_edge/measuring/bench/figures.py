"""Figures of what was measured: of each subject, and of the bundle against the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from stem_edge.measuring.bench.cases import CaseResult, PhasePeak, Watched
from stem_edge.measuring.bench.workers import WorkerAnswer


@dataclass(frozen=True)
class OnDevice:
    """Figures of a subject on an accelerator, real or emulated; memory in bytes."""

    about: dict[str, str]  # provider, device, driver, variant of the graphs
    planned: int  # in the memory plan, weights included
    row_cache_planned: int  # slots, a part of that
    slots: int
    allocated: int  # KV cache, slots, hidden states, but not what onnxruntime takes for itself
    driver_says: int | None  # for the whole process, if NVIDIA's driver tells
    uploaded_rows_per_token: float
    uploaded_bytes_per_token: float
    uploaded_bytes_per_prompt_token: float


@dataclass(frozen=True)
class Round:
    """A prompt and the tokens after it, on one subject."""

    prompt_tokens: int
    before: dict[str, float]  # counters before the prompt; a missing one was 0
    prefill: WorkerAnswer
    decode: WorkerAnswer

    def of_prompt(self) -> dict[str, float]:
        """Return the growth of the counters for a token of the prompt."""
        return _grown(self.before, self.prefill.counters, self.prompt_tokens)

    def of_steps(self) -> dict[str, float]:
        """Return the growth of the counters for a decode step."""
        return _grown(self.prefill.counters, self.decode.counters, len(self.decode.steps))

    def rates(self) -> dict[str, float]:
        """Return the tokens a second."""
        steps = self.decode.steps
        return {
            "prefill": self.prompt_tokens / self.prefill.seconds,
            "decode": len(steps) / sum(steps),
            "median_step": 1 / median(steps),
        }


@dataclass(frozen=True)
class Figures:
    """Medians over the rounds of one subject; None for what was not counted or watched."""

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
    slots: int | None  # of the row cache
    peak_memory: dict[str, PhasePeak]
    on_device: OnDevice | None
    rounds: dict[str, list[float]]  # tokens a second
    network_bytes_per_token: float | None = None


@dataclass(frozen=True)
class Ratio:
    """Speed of the bundle over that of another subject, in the same rounds."""

    against: str
    rate: str  # key of Round.rates
    median: float
    least: float
    most: float


@dataclass(frozen=True)
class BenchSettings:
    """Settings of a bench."""

    text: str  # source of the tokens, in words
    prompt_tokens: int
    new_tokens: int
    rounds: int
    loads: int
    context_length: int
    threads: int
    cold: bool
    limit: int | None  # memory of each process, mapped files included; each round loads anew then
    engine: str
    options: dict[str, Any]  # the other options of stem_edge.load


@dataclass(frozen=True)
class Report:
    """Results of a bench. Sizes in bytes, times in seconds, rates a second."""

    bundle: str
    machine: str
    versions: dict[str, str]
    settings: BenchSettings
    # Of `cases`; the others are those without.
    results: list[CaseResult] = field(default_factory=list)
    subjects: dict[str, Figures] = field(default_factory=dict)  # the first one is the bundle
    ratios: list[Ratio] = field(default_factory=list)
    # Of the machine's memory, before each round, because it changes if others use the machine. Empty
    # for a device, which has its own memory.
    bandwidth: list[float] = field(default_factory=list)
    token_nbytes: int = 0
    bandwidth_reached: float | None = None  # share of what bandwidth and token_nbytes allow
    failed: dict[str, str] = field(default_factory=dict)  # round without figures, and why


def figures_of(found: Sequence[Round], watched: Watched) -> Figures:
    """Return the figures of a subject in all rounds."""
    steps = [counted for each in found if (counted := each.of_steps())]
    speeds = [each.rates() for each in found]
    rounds = {rate: [speed[rate] for speed in speeds] for rate in speeds[0]}
    slots = found[-1].decode.counters.get("slots")
    return Figures(
        prefill_tokens_per_second=median(rounds["prefill"]),
        decode_tokens_per_second=median(rounds["decode"]),
        median_step_tokens_per_second=median(rounds["median_step"]),
        first_token_seconds=median(each.prefill.seconds for each in found),
        load_seconds=_median([load for load, _ in watched.loads]),
        load_to_first_token_seconds=_median([first for _, first in watched.loads]),
        cold_load_to_first_token_seconds=_median([first for _, first in watched.cold_loads]),
        flash_bytes_per_token=_median([counted["bytes_read"] for counted in steps]),
        stall_seconds_per_token=_median([counted["stall_seconds"] for counted in steps]),
        hit_rate=_hit_rate(steps, "hits", "misses"),
        slots=None if slots is None else int(slots),
        peak_memory=watched.peaks,
        on_device=_on_device(found, watched, steps),
        rounds=rounds,
        network_bytes_per_token=_median([counted.get("network_bytes", 0.0) for counted in steps]),
    )


def ratios(subjects: dict[str, Figures]) -> list[Ratio]:
    """Compare the first subject with each of the others, in the rounds that both have."""
    (_, bundle), *others = subjects.items()
    found = []
    for name, other in others:
        for rate, mine in bundle.rounds.items():
            values = [ours / its for ours, its in zip(mine, other.rounds[rate], strict=False)]
            found.append(Ratio(name, rate, median(values), min(values), max(values)))
    return found


def _on_device(
    found: Sequence[Round], watched: Watched, steps: list[dict[str, float]]
) -> OnDevice | None:
    if not watched.about:
        return None
    last = found[-1].decode.counters
    prompts = [each.of_prompt() for each in found]
    return OnDevice(
        about=watched.about,
        planned=int(last.get("device_planned", 0)),
        row_cache_planned=int(last.get("device_row_cache_planned", 0)),
        slots=int(last.get("slots", 0)),
        allocated=int(last.get("device_allocated", 0)),
        driver_says=watched.driver_says,
        uploaded_rows_per_token=_mean(steps, "uploaded_rows"),
        uploaded_bytes_per_token=_mean(steps, "uploaded_bytes"),
        uploaded_bytes_per_prompt_token=_mean(prompts, "uploaded_bytes"),
    )


def _grown(before: dict[str, float], after: dict[str, float], tokens: int) -> dict[str, float]:
    return {name: (count - before.get(name, 0)) / tokens for name, count in after.items()}


def _hit_rate(counters: list[dict[str, float]], hit: str, missed: str) -> float | None:
    hits = sum(c.get(hit, 0) for c in counters)
    uses = hits + sum(c.get(missed, 0) for c in counters)
    return hits / uses if uses else None


def _mean(counters: list[dict[str, float]], name: str) -> float:
    return sum(c.get(name, 0) for c in counters) / max(1, len(counters))


def _median(values: list[float]) -> float | None:
    return median(values) if values else None
