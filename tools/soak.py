"""Generate for hours, in every way of ending or not, and see whether memory, threads and files stay flat.

    python tools/soak.py [BUNDLE] --minutes 60
    python tools/soak.py --generations 10000 --json

One model is loaded once. Generations are short and of random lengths: run to their end, closed
midway, dropped midway, never begun, sampled, with made rows, and some in four threads at once. Now
and then, anonymous memory, threads and open files are counted. Exit status 1 if memory grows by
1 MiB in 10,000 generations or more, or threads or files have become more.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import stem_edge
from stem_edge.runtime.machine import own_memory, return_freed_memory
from stem_edge.runtime.model import Chunk, Model

DEMO = Path(stem_edge.__file__).parent / "demo_model"
FDS = Path("/proc/self/fd")
SAMPLES = 40  # of a soak of so many generations; by minutes, one a second
WARM_UP = 0.3  # of the samples: what is allocated once and kept
MOST_SLOPE = 1 << 20  # bytes per 10,000 generations
CALLERS = 4
TOGETHER_EVERY = 25  # generations


@dataclass(frozen=True)
class Sample:
    """What the process held after so many generations."""

    generations: int
    seconds: float
    memory: int  # RssAnon and VmSwap, freed memory given back
    threads: int
    files: int


@dataclass(frozen=True)
class Verdict:
    """What came of it."""

    generations: int
    seconds: float
    memory: int  # at the end
    slope: float  # bytes per 10,000 generations, warm-up left out
    more_threads: int
    more_files: int

    def flat(self, most_slope: float = MOST_SLOPE) -> bool:
        """Whether nothing grows."""
        return self.slope < most_slope and self.more_threads <= 0 and self.more_files <= 0

    def line(self) -> str:
        """One line for people."""
        return (
            f"{self.generations:,} generations in {self.seconds:.0f} s: memory "
            f"{self.memory / 2**20:.1f} MiB, {self.slope / 2**20:+.3f} MiB per 10,000 generations; "
            f"threads {self.more_threads:+d}, open files {self.more_files:+d}: "
            + ("flat" if self.flat() else "not flat, or too short to tell")
        )


class Soak:
    """Generations with one model, of a seed."""

    def __init__(self, model: Model, seed: int = 0) -> None:
        self.model, self.samples = model, list[Sample]()
        self.generations = 0
        self._rng, self._started = np.random.default_rng(seed), time.monotonic()

    def run(self, more: Callable[[Sample], bool], every: Callable[[Sample], bool]) -> Verdict:
        """Generate while `more`, sampling whenever `every` says so of the latest sample."""
        self.samples.append(self._sample())
        while more(self.samples[-1]):
            if self._rng.integers(TOGETHER_EVERY) == 0:
                self._in_threads()
                self.generations += CALLERS
            else:
                self._one(self._rng)
                self.generations += 1
            if every(self.samples[-1]):
                self.samples.append(self._sample())
        self.samples.append(self._sample())
        return self.verdict()

    def _in_threads(self) -> None:
        errors: list[BaseException] = []

        def call(rng: np.random.Generator) -> None:
            try:
                self._one(rng)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=call, args=(one,)) for one in self._rng.spawn(CALLERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _one(self, rng: np.random.Generator) -> None:
        """One generation, and one of its ends."""
        stream = self._stream(rng)
        end = rng.choice(["ran", "closed", "dropped", "never begun"], p=[0.4, 0.3, 0.25, 0.05])
        if end == "ran":
            for _ in stream:
                pass
        elif end != "never begun":
            for _ in range(int(rng.integers(1, 4))):
                next(stream, None)
        if end == "closed":
            stream.close()  # type: ignore[attr-defined]

    def _stream(self, rng: np.random.Generator) -> Iterator[Chunk]:
        model, new = self.model, int(rng.integers(1, 9))
        most = max(1, min(24, model.plan.context_length - new))
        prompt = rng.integers(0, model.config.vocab_size, int(rng.integers(1, most + 1))).tolist()
        sampled = rng.random() < 0.3
        made = rng.random() < 0.1 and model.config.stem_layers and not model.config.n_experts
        return model.generate(
            prompt,
            stem_ids=[[prompt[0], prompt[-1]], *prompt[1:]] if made else None,
            max_new_tokens=new,
            temperature=0.8 if sampled else 0.0,
            top_p=0.9 if sampled else 1.0,
            logprobs=2 if rng.random() < 0.1 else None,
            seed=int(rng.integers(1 << 30)),
        )

    def _sample(self) -> Sample:
        gc.collect()
        return_freed_memory()
        files = len(list(FDS.iterdir())) if FDS.is_dir() else 0
        seconds = time.monotonic() - self._started
        return Sample(self.generations, seconds, own_memory(), threading.active_count(), files)

    def verdict(self) -> Verdict:
        """Of the samples so far."""
        kept = self.samples[int(WARM_UP * len(self.samples)) :]
        last, counts = kept[-1], [one.generations for one in kept]
        slope = 0.0
        if len(set(counts)) > 1:
            slope = float(np.polyfit(counts, [one.memory for one in kept], 1)[0]) * 10_000
        return Verdict(
            last.generations,
            last.seconds,
            last.memory,
            slope,
            last.threads - kept[0].threads,
            last.files - kept[0].files,
        )


def soak_generations(model: Model, generations: int, seed: int = 0) -> Soak:
    """A soak of so many generations."""
    soak, step = Soak(model, seed), max(1, generations // SAMPLES)
    soak.run(
        lambda _: soak.generations < generations,
        lambda last: soak.generations - last.generations >= step,
    )
    return soak


def soak_minutes(model: Model, minutes: float, seed: int = 0) -> Soak:
    """A soak of so many minutes."""
    soak = Soak(model, seed)
    end = time.monotonic() + 60 * minutes
    soak.run(
        lambda _: time.monotonic() < end,
        lambda last: time.monotonic() - soak._started - last.seconds >= 1,
    )
    return soak


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", nargs="?", default=str(DEMO))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--generations", type=int, help="so many, and not for a time")
    parser.add_argument("--engine", choices=["auto", "onnxruntime", "ggml"], default="auto")
    parser.add_argument("--slots", type=int, help="of the row cache; default: a tenth of the rows")
    parser.add_argument("--threads", type=int, default=1, help="of the backbone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="all samples, for machines")
    given = parser.parse_args(arguments)
    if given.minutes <= 0 or (given.generations is not None and given.generations < 1):
        parser.error("--minutes and --generations must be above 0")
    slots = given.slots
    if slots is None:
        records = stem_edge.open_bundle(given.bundle).manifest.model.records
        slots = max(4, records // 10) if records else None
    with stem_edge.load(
        given.bundle, engine=given.engine, threads=given.threads, slots=slots
    ) as model:
        if given.generations is not None:
            soak = soak_generations(model, given.generations, given.seed)
        else:
            soak = soak_minutes(model, given.minutes, given.seed)
    verdict = soak.verdict()
    if given.json:
        samples = [asdict(sample) for sample in soak.samples]
        print(json.dumps(asdict(verdict) | {"flat": verdict.flat(), "samples": samples}))
    else:
        print(verdict.line())
    return 0 if verdict.flat() else 1


if __name__ == "__main__":
    sys.exit(main())
