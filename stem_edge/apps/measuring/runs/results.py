"""Results of a measurement: phases of each run, medians over the rounds, ratios of models."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

from stem_edge.apps.measuring.sampler import PhaseMemory

RATES = ("prompt", "decode", "median_step")  # names of figures in tokens a second
TO_FIRST_TOKEN = ("start", "load", "first")


@dataclass(frozen=True)
class Phase:
    """Time and memory of one phase of a run. Sizes in bytes."""

    name: str  # start, load, first, prompt or decode
    seconds: float
    tokens: int  # processed by the model
    memory: PhaseMemory
    steps: list[float]  # seconds of each step, when decoding
    counters: dict[str, float]  # at the end; llama.cpp has none


@dataclass(frozen=True)
class Round:
    """One run of a bundle or GGUF file, in a process that does nothing else."""

    phases: list[Phase]

    @cached_property
    def figures(self) -> dict[str, float]:
        """Metrics of the run by name; metrics that were not measured are missing."""
        phases = {phase.name: phase for phase in self.phases}
        steps = phases["decode"].steps
        found = {
            "load_seconds": phases["load"].seconds,
            "first_token_seconds": sum(phases[name].seconds for name in TO_FIRST_TOKEN),
            "prompt": phases["prompt"].tokens / phases["prompt"].seconds,
            "decode": len(steps) / sum(steps),
            "median_step": 1 / median(steps),
            "peak_anonymous": max(phase.memory.peak_unevictable for phase in self.phases),
        }
        backbones = (phase.memory.at_end.backbone for phase in self.phases)
        mapped = [nbytes for nbytes in backbones if nbytes is not None]
        found |= {"mapped": max(mapped)} if mapped else {}
        return found | self._of_rows()

    def _of_rows(self) -> dict[str, float]:
        """Return row-cache hit rate, row reads and stalls of decoding; empty for a dense model."""
        before, decode = self.phases[-2:]
        grown = {name: n - before.counters.get(name, 0) for name, n in decode.counters.items()}
        if not (used := grown.get("hits", 0) + grown.get("misses", 0)):
            return {}
        return {
            "hit_rate": grown["hits"] / used,
            "flash_bytes_per_token": grown["bytes_read"] / decode.tokens,
            "stall_seconds_per_token": grown["stall_seconds"] / decode.tokens,
            "slots": decode.counters["slots"],
        }


@dataclass
class SubjectResult:
    rounds: list[Round] = field(default_factory=list)
    failed: str = ""  # which round failed, and why

    def figures(self) -> dict[str, float]:
        """Return each metric's median over the rounds; for peaks of memory, the maximum."""
        names = self.rounds[0].figures if self.rounds else {}
        of = {name: [each.figures[name] for each in self.rounds] for name in names}
        return {
            name: max(values) if name.startswith("peak") else median(values)
            for name, values in of.items()
        }


@dataclass(frozen=True)
class Report:
    """Results of a measurement. Sizes in bytes, times in seconds, rates per second."""

    bundle: str
    machine: str
    settings: dict[str, Any]
    subjects: dict[str, SubjectResult]  # the first one is the bundle

    def ratios(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return other model -> metric -> median, least and most of bundle / other model over the rounds."""
        (_, bundle), *others = self.subjects.items()
        return {
            name: {rate: _spread(bundle, other, rate) for rate in RATES}
            for name, other in others
            if other.rounds
        }


def _spread(bundle: SubjectResult, other: SubjectResult, rate: str) -> dict[str, float]:
    rounds = zip(bundle.rounds, other.rounds, strict=False)
    found = [mine.figures[rate] / its.figures[rate] for mine, its in rounds]
    return {"median": median(found), "least": min(found), "most": max(found)}
