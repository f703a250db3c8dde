"""Threads, files and memory stay flat over hundreds of generations that end in every way."""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import soak
from growth import Growth, Sample, growth
from installed import DEMO
from threads import tokens

import stem_edge
from stem_edge.errors import InputError
from stem_edge.graph.formats import EngineName
from stem_edge.runtime import Chunk, Model
from stem_edge.system.memory import own_memory, return_freed_memory

pytestmark = pytest.mark.slow
only_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells its memory")
FDS = Path("/proc/self/fd")
# In a whole suite, other tests' garbage moves too; a leak of a few hundred bytes a generation shows.
GENEROUS = 4 << 20
CALLERS = 4


def run_many(model: Model, generations: int, samples: int) -> Growth:
    """Generate by one caller and sometimes by four; return what grew.

    A conversation that is held at each sample must always have the same answers.
    """
    rng, done, answers = np.random.default_rng(0), 0, same_answers(model)
    taken = [sample(0)]
    while done < generations:
        callers = CALLERS if rng.integers(25) == 0 else 1
        with ThreadPoolExecutor(callers) as pool:
            done += sum(pool.map(generate, [model] * callers, rng.spawn(callers)))
        if done * samples >= len(taken) * generations:
            assert same_answers(model) == answers
            taken.append(sample(done))
    return growth(taken)


def sample(done: int) -> Sample:
    gc.collect()
    return_freed_memory()
    return Sample(done, 0.0, own_memory(), threading.active_count(), len([*FDS.iterdir()]))


def same_answers(model: Model) -> list[str]:
    with model.conversation() as talk, suppress(InputError):  # until the context is full
        for asked in ("Hello.", "And then?", "Why?"):
            for _ in talk.send(asked, max_new_tokens=12):
                pass
    return [message["content"] for message in talk.messages]


def generate(model: Model, rng: np.random.Generator) -> int:
    """Generate once, or for each turn of a conversation. Returns the number of generations."""
    if rng.random() >= 0.1:
        return end(stream(model, rng), rng)
    done = 0
    with model.conversation() as talk, suppress(InputError):  # until the context is full
        for turn in range(int(rng.integers(1, 6))):
            again = turn > 0 and rng.random() < 0.3
            new = int(rng.integers(1, 9))
            asked = f"What about {rng.integers(100)}?"
            done += end(
                talk.retry(max_new_tokens=new) if again else talk.send(asked, max_new_tokens=new),
                rng,
            )
    return done


def end(chunks: Iterator[Chunk], rng: np.random.Generator) -> int:
    """End an answer in a random way. Returns 1, the number of generations."""
    way = rng.choice(["ran", "closed", "dropped", "never begun"], p=[0.4, 0.3, 0.25, 0.05])
    if way == "ran":
        for _ in chunks:
            pass
    elif way != "never begun":
        for _ in range(int(rng.integers(1, 4))):
            next(chunks, None)
    if way == "closed":
        chunks.close()  # type: ignore[attr-defined]
    return 1


def stream(model: Model, rng: np.random.Generator) -> Iterator[Chunk]:
    new = int(rng.integers(1, 9))
    longest = max(1, min(24, model.plan.context_length - new))
    prompt = rng.integers(0, model.config.vocab_size, int(rng.integers(1, longest + 1))).tolist()
    sampled, composed = rng.random() < 0.3, rng.random() < 0.1 and model.config.stem_layers
    return model.generate(
        prompt,
        stem_ids=[[prompt[0], prompt[-1]], *prompt[1:]] if composed else None,
        max_new_tokens=new,
        temperature=0.8 if sampled else 0.0,
        top_p=0.9 if sampled else 1.0,
        logprobs=2 if rng.random() < 0.1 else None,
        seed=int(rng.integers(1 << 30)),
    )


@only_linux
@pytest.mark.parametrize(("engine", "generations"), [("onnxruntime", 600), ("ggml", 400)])
def test_short_generations_leak_nothing(engine: EngineName, generations: int, tiny: Path) -> None:
    with stem_edge.load(tiny, engine=engine, slots=32, threads=1) as model:
        expected = tokens(model, [5, 6, 7])
        runs = (run_many(model, generations, samples=40) for _ in range(2))
        assert any(run.flat(GENEROUS * 10_000 / generations) for run in runs)  # leaks grow twice
        assert tokens(model, [5, 6, 7]) == expected


@only_linux
def test_answers_of_a_server_are_those_in_process(capsys: pytest.CaptureFixture[str]) -> None:
    """So few requests tell nothing of leaks."""
    soak.main([str(DEMO), "--requests", "120"])
    said = capsys.readouterr().out
    assert (right := re.search(r"120 requests in .* (\d+) right; memory", said)), said
    assert int(right[1]) > 40
