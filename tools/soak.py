"""Generate for hours and check that memory, threads and open files stay flat.

    python tools/soak.py [BUNDLE] --minutes 60
    python tools/soak.py --generations 10000 --json

The model is loaded once. Generations are short, of random lengths, and end in every way: run to the
end, closed or dropped midway, never begun. Some are sampled, some have composed rows, some are turns of
conversations, and some run in four threads at once. Exit status 1 if anonymous memory grows by 1 MiB or
more in 10,000 generations (by twice the standard error, so that it is sure), if the later half sees more
threads or open files than the first, or if a conversation that is held again and again gets other answers.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

import stem_edge
from stem_edge.commands.running.demo import demo_bundle
from stem_edge.errors import InputError
from stem_edge.runtime import Chunk, Model
from stem_edge.system.memory import own_memory, return_freed_memory

FDS = Path("/proc/self/fd")
SAMPLES = 40  # spread evenly over the soak
WARM_UP = 0.3  # share of the samples left out, because some memory is allocated once and kept
MAX_SLOPE = 1 << 20  # bytes per 10,000 generations
CALLERS = 4
CONCURRENT_EVERY = 25  # turns, on average


@dataclass(frozen=True)
class Sample:
    """Resources that a process holds after some work."""

    done: int  # generations or requests
    seconds: float
    memory: int  # bytes, anonymous and in swap
    threads: int
    files: int


@dataclass(frozen=True)
class Growth:
    """Growth over a soak, without the warm-up."""

    slope: float  # bytes per 10,000 generations or requests
    error: float  # standard error of the slope, because memory goes up and down by itself
    more_threads: int
    more_files: int

    def flat(self, max_slope: float) -> bool:
        """Return whether nothing grows for sure."""
        least = self.slope - 2 * self.error
        return least < max_slope and self.more_threads <= 0 and self.more_files <= 0

    def line(self, last: Sample) -> str:
        """Return a part of a report."""
        return (
            f"memory {last.memory / 2**20:.1f} MiB, {self.slope / 2**20:+.2f} MiB per 10,000 "
            f"(standard error {self.error / 2**20:.2f}); "
            f"threads {self.more_threads:+d}, open files {self.more_files:+d}"
        )


def growth(samples: Sequence[Sample]) -> Growth:
    """Return what grew. Threads come and go with the load, so the highest counts are compared."""
    kept = samples[int(WARM_UP * len(samples)) :]
    done, memory = np.array([[sample.done, sample.memory] for sample in kept], float).T
    slope = error = 0.0
    if (spread := float(np.sum((done - done.mean()) ** 2))) and len(kept) > 2:
        slope, start = np.polyfit(done, memory, 1)
        rest = float(np.sum((memory - slope * done - start) ** 2))
        error = (rest / (len(kept) - 2) / spread) ** 0.5
    early, late = kept[: (len(kept) + 1) // 2], kept[len(kept) // 2 :]
    return Growth(
        float(slope) * 10_000,
        error * 10_000,
        max(sample.threads for sample in late) - max(sample.threads for sample in early),
        max(sample.files for sample in late) - max(sample.files for sample in early),
    )


@dataclass(frozen=True)
class Verdict:
    """Growth over a soak, and whether the same conversation always had the same answers."""

    samples: list[Sample]
    growth: Growth
    same: bool

    def flat(self, max_slope: float = MAX_SLOPE) -> bool:
        """Return whether nothing grows or changes."""
        return self.growth.flat(max_slope) and self.same

    def line(self) -> str:
        """Return a report of one line."""
        last = self.samples[-1]
        return (
            f"{last.done:,} generations in {last.seconds:.0f} s: {self.growth.line(last)}; "
            f"the same answers {len(self.samples)} times: {'yes' if self.same else 'NO'}: "
            + ("flat" if self.flat() else "not flat, or too short to tell")
        )


def soak(
    model: Model, generations: float = float("inf"), minutes: float = float("inf"), seed: int = 0
) -> Verdict:
    """Generate so often, or for so long, and return what grew."""
    rng, answers = np.random.default_rng(seed), [same_answers(model)]
    samples, done = [_sample(0, 0.0)], 0
    started = time.monotonic()
    while True:
        seconds = time.monotonic() - started
        share = max(done / generations, seconds / (60 * minutes))
        if share * SAMPLES >= len(samples):
            answers.append(same_answers(model))
            samples.append(_sample(done, seconds))
        if share >= 1:
            break
        if rng.integers(CONCURRENT_EVERY) == 0:
            with ThreadPoolExecutor(CALLERS) as pool:
                done += sum(pool.map(generate_one, [model] * CALLERS, rng.spawn(CALLERS)))
        else:
            done += generate_one(model, rng)
    same = all(each == answers[0] for each in answers)
    return Verdict(samples, growth(samples), same)


def same_answers(model: Model) -> list[str]:
    """Hold a conversation, and return its answers."""
    with model.conversation() as talk, suppress(InputError):  # until the context is full
        for asked in ("Hello.", "And then?", "Why?"):
            for _ in talk.send(asked, max_new_tokens=12):
                pass
    return [message["content"] for message in talk.messages]


def generate_one(model: Model, rng: np.random.Generator) -> int:
    """Generate once, or for each turn of a conversation. Returns how often."""
    if rng.random() >= 0.1:
        return _end(_stream(model, rng), rng)
    done = 0
    with model.conversation() as talk, suppress(InputError):  # until the context is full
        for turn in range(int(rng.integers(1, 6))):
            again = turn > 0 and rng.random() < 0.3
            new = int(rng.integers(1, 9))
            asked = f"What about {rng.integers(100)}?"
            done += _end(
                talk.retry(max_new_tokens=new) if again else talk.send(asked, max_new_tokens=new),
                rng,
            )
    return done


def _end(stream: Iterator[Chunk], rng: np.random.Generator) -> int:
    """End an answer in a random way. Returns 1, the number of generations."""
    end = rng.choice(["ran", "closed", "dropped", "never begun"], p=[0.4, 0.3, 0.25, 0.05])
    if end == "ran":
        for _ in stream:
            pass
    elif end != "never begun":
        for _ in range(int(rng.integers(1, 4))):
            next(stream, None)
    if end == "closed":
        stream.close()  # type: ignore[attr-defined]
    return 1


def _stream(model: Model, rng: np.random.Generator) -> Iterator[Chunk]:
    new = int(rng.integers(1, 9))
    longest = max(1, min(24, model.plan.context_length - new))
    prompt = rng.integers(0, model.config.vocab_size, int(rng.integers(1, longest + 1))).tolist()
    sampled = rng.random() < 0.3
    composed = rng.random() < 0.1 and model.config.stem_layers and not model.config.n_experts
    return model.generate(
        prompt,
        stem_ids=[[prompt[0], prompt[-1]], *prompt[1:]] if composed else None,
        max_new_tokens=new,
        temperature=0.8 if sampled else 0.0,
        top_p=0.9 if sampled else 1.0,
        logprobs=2 if rng.random() < 0.1 else None,
        seed=int(rng.integers(1 << 30)),
    )


def _sample(generations: int, seconds: float) -> Sample:
    gc.collect()
    return_freed_memory()
    files = len(list(FDS.iterdir())) if FDS.is_dir() else 0
    return Sample(generations, seconds, own_memory(), threading.active_count(), files)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", nargs="?", type=Path, default=demo_bundle())
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--generations", type=int, help="run so many, instead of --minutes")
    parser.add_argument("--engine", choices=["auto", "onnxruntime", "ggml"], default="auto")
    parser.add_argument("--slots", type=int, help="row cache slots (a tenth of the rows)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the backbone (1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print all samples as JSON")
    given = parser.parse_args(arguments)
    if given.minutes <= 0 or (given.generations is not None and given.generations < 1):
        parser.error("--minutes and --generations must be above 0")
    records = stem_edge.open_bundle(given.bundle).manifest.model.records
    slots = given.slots or (max(4, records // 10) if records else None)
    limit = {"minutes": given.minutes}
    if given.generations is not None:
        limit = {"generations": given.generations}
    with stem_edge.load(
        given.bundle, engine=given.engine, threads=given.threads, slots=slots, exact=True
    ) as model:
        verdict = soak(model, **limit, seed=given.seed)
    if given.json:
        print(json.dumps(asdict(verdict) | {"flat": verdict.flat()}))
    else:
        print(verdict.line())
    return 0 if verdict.flat() else 1


if __name__ == "__main__":
    sys.exit(main())
