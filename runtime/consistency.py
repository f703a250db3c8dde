"""Checking, on the user's own machine, that a bundle gives the same tokens however it is run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from stem_edge.bundle.opening import Bundle, open_bundle
from stem_edge.errors import BackendError, InputError
from stem_edge.runtime.backends.engines import check_installed, engines_of
from stem_edge.runtime.backends.interface import MOST, SIZES, StepCosts
from stem_edge.runtime.backends.ways import EngineWays, Ways
from stem_edge.runtime.loading import load
from stem_edge.runtime.model import Model
from stem_edge.runtime.steps import Guesses
from stem_edge.runtime.text.codec import same_start
from stem_edge.system.memory import available_memory

PROMPT_TOKENS, NEW_TOKENS = 96, 32
# Tables are made resident only if they fit into this share of the available memory.
RESIDENT_SHARE = 0.5
NOT_RUN = "not run"
TEXT = """\
A memory of words is no memory of things: whoever counts the ships in a harbour at dawn, the masts
and the ropes, the gulls above them, will remember the cold, and the colour of the water."""
Progress: TypeAlias = Callable[[str], object]
Ids: TypeAlias = list[int]
Way: TypeAlias = Callable[[Model, Sequence[Ids], Sequence[Ids]], list[Ids]]
WRONG = 5  # of the guesses that are tried, one of so many
FEWER = 64  # tokens of a chunk, rather than 128; kernels of ggml demand so many


class Asked(NamedTuple):
    """Prompts to be answered: pieces of a text, at equal distances."""

    text: str = TEXT
    prompts: int = 1
    prompt_tokens: int = PROMPT_TOKENS  # of each, at most
    new_tokens: int = NEW_TOKENS

    def pieces(self, model: Model) -> list[Ids]:
        """Return the prompts. Raises InputError."""
        new, length = self.new_tokens, model.plan.context_length
        if (room := length - new) < 1:
            raise InputError(
                f"{new} new tokens leave no room for a prompt in the context of {length}; ask for fewer"
            )
        ids, size = model.tokenize(self.text), min(self.prompt_tokens, room)
        between = max(0, len(ids) - size) // self.prompts
        if not between and self.prompts > 1:
            raise InputError(
                f"a text of {len(ids)} tokens has no {self.prompts} pieces of {size}; give a longer one, "
                "or ask for fewer or shorter prompts"
            )
        return [ids[n * between : n * between + size] for n in range(self.prompts)]


def verify_runs(
    path: str | Path,
    prompt: str = TEXT,
    max_new_tokens: int = NEW_TOKENS,
    cache_dir: str | Path | None = None,
    progress: Progress = lambda name: None,
    *,
    asked: Asked | None = None,
) -> dict[str, str]:
    """Generate greedily in every way of running a bundle; way -> "ok", or where tokens differ.

    Engines, and different kernels of one engine, round differently, so only ways that use the same
    kernels are compared; on ggml, that also separates chunks of 64 tokens or more from smaller ones.
    An engine that is not installed, but that the bundle has a backbone for, is reported as
    "not run: ...", as are ways that round otherwise here. `progress` is called with the name of
    each way before it runs. asked: prompts in place of `prompt`, which are loaded in no other ways
    than the plain one.

    Raises what `load` raises, and BackendError if no engine could run.
    """
    bundle = open_bundle(path)
    engines = engines_of(bundle)
    if not any(engine.installed for engine in engines):
        check_installed(bundle, engines[0].name)
    results: dict[str, str] = {}
    for engine in engines:
        absent = "" if engine.installed else f"{engine.name} is not installed"
        if reason := absent or engine.ways.missing(cache_dir):
            progress(engine.name)
            results[engine.name] = f"{NOT_RUN}: {reason}"
            continue
        for kernels, choice in engine.ways.kernels(bundle, cache_dir).items():
            one = asked or Asked(prompt, new_tokens=max_new_tokens)
            options = choice | {"engine": engine.name, "cache_dir": cache_dir}
            if asked is not None:
                length = asked.prompt_tokens + asked.new_tokens
                options["context_length"] = min(length, bundle.manifest.model.max_context)
            runs = _Runs(bundle, engine.ways, one, options, kernels, progress, results)
            runs.load_all(plain_alone=asked is not None)
            runs.answer_all()
    if all(result.startswith(NOT_RUN) for result in results.values()):
        raise BackendError(f"{bundle.path}: {'; '.join(results.values())}")
    return results


class _Runs:
    """The runs with one engine's kernels; results: way -> what came of it, of other kernels, too."""

    def __init__(
        self,
        bundle: Bundle,
        own: EngineWays,
        asked: Asked,
        options: dict[str, Any],
        kernels: str,
        progress: Progress,
        results: dict[str, str],
    ) -> None:
        self._bundle, self._own, self._asked, self._options = bundle, own, asked, options
        self._kernels, self._progress, self._results = kernels, progress, results
        self._expected: dict[bool, list[Ids]] = {}  # whether chunks are tiled -> answers

    def load_all(self, *, plain_alone: bool) -> None:
        """Run each way that the bundle can be loaded, or the plain one alone."""
        own = self._own
        for way, options in _ways(self._bundle, own, self._options["cache_dir"]).items():
            tiled = options.get("slots", own.tile) >= own.tile
            self._check(
                way, partial(_run, self._bundle.path, self._asked, options | self._options), tiled
            )
            if plain_alone:
                return

    def answer_all(self) -> None:
        """Run each way that answers can be computed in a loaded bundle."""
        with self._load(keep_prefixes=False) as model:
            prompts, expected = self._asked.pieces(model), self._expected[True]
            ways = _ways_of(model)
            if any(0 < len(ids) % FEWER < self._own.tile for ids in prompts if len(ids) > FEWER):
                few = f"steps of fewer than {self._own.tile} tokens round otherwise"
                ways["smaller chunks"] = f"{few}; give --text, and --prompt-tokens {2 * FEWER}"
            for way, run in ways.items():
                if isinstance(run, str):
                    self._progress(self._name(way))
                    self._note(way, f"{NOT_RUN}: {run}")
                else:
                    self._check(way, partial(run, model, prompts, expected))
        with self._load() as model:
            self._check("kept prefixes", partial(_after_beginnings, model, prompts, expected))
        self._check("prefixes kept in files", partial(self._restarted, prompts))

    def _restarted(self, prompts: Sequence[Ids]) -> list[Ids]:
        with tempfile.TemporaryDirectory() as folder:
            with self._load(prompt_cache=folder) as model:
                _answers(model, _begun(prompts), 1)
            with self._load(prompt_cache=folder) as model:
                return _answers(model, prompts, self._asked.new_tokens)

    def _load(self, **options: Any) -> Model:
        return load(self._bundle.path, **self._options, **options)

    def _check(self, way: str, run: Callable[[], list[Ids]], tiled: bool = True) -> None:
        self._progress(self._name(way))
        found = run()
        self._note(way, _compared(found, self._expected.setdefault(tiled, found)))

    def _note(self, way: str, result: str) -> None:
        self._results[self._name(way)] = result

    def _name(self, way: str) -> str:
        return f"{way}, {self._kernels}" if self._kernels else way


def _compared(found: list[Ids], expected: list[Ids]) -> str:
    """Return "ok", or where answers differ."""
    pairs = enumerate(zip(found, expected, strict=True), 1)
    others = [(n, same_start(one, other) + 1) for n, (one, other) in pairs if one != other]
    if not others:
        return "ok"
    where = f"other tokens from new token {others[0][1]} on"
    if len(expected) == 1:
        return where
    return f"{len(others)} of {len(expected)} answers differ, the first of prompt {others[0][0]}: {where}"


def _ways(bundle: Bundle, own: EngineWays, cache_dir: str | Path | None) -> Ways:
    """Ways to run an engine: name -> options of `load`. The first is what others must agree with."""
    tables = bundle.manifest.tables
    plain = {"overlap": False, "prepare": False, "warm_start": False, "keep_prefixes": False}
    ways: Ways = {"plain": plain, "overlapped": plain | {"overlap": True}}
    ways |= {name: plain | options for name, options in own.ways(bundle, cache_dir).items()}
    if tables is None:
        return ways
    model, (fewest, several) = bundle.manifest.model, own.few_slots
    fewest = fewest * model.lookups + max(0, model.row_window - 1)
    several = min(max(fewest, several), tables.records)
    ways |= {
        "fewest slots": plain | {"slots": min(fewest, tables.records)},
        f"{several} slots, overlapped": plain | {"slots": several, "overlap": True},
        "overlapped": plain | {"overlap": True},
        "warm start": plain | {"warm_start": True},
        "emulated SD card, overlapped": plain | {"emulate_flash": "sdcard", "overlap": True},
    }
    if tables.records * tables.record_nbytes < RESIDENT_SHARE * available_memory():
        ways["resident"] = plain | {"resident": True}
    return ways


def _run(path: Path, asked: Asked, options: dict[str, Any]) -> list[Ids]:
    with load(path, **options) as model:
        return _answers(model, asked.pieces(model), asked.new_tokens)


def _answers(model: Model, prompts: Sequence[Ids], new: int) -> list[Ids]:
    """Return the greedy answers to prompts, one after the other."""
    return [
        [
            token
            for chunk in model.generate(ids, max_new_tokens=new, temperature=0)
            for token in chunk.token_ids
        ]
        for ids in prompts
    ]


def _ways_of(model: Model) -> dict[str, Way | str]:
    """Return the ways of a model that keeps no prompts; of those that round otherwise, why they are not run."""
    ways: dict[str, Way | str] = {"smaller chunks": _in_chunks}
    if (costs := model.stepping.costs) is not None:
        unlike = "preparing found other bits than those of steps of one"
        ways["guesses"] = _guessed if costs.same_bits else unlike
        if not costs.same_in_batches:
            ways["batches"] = f"{unlike}; exact ones take a sequence at a time"
        ways["batches" if costs.same_in_batches else "exact batches"] = _in_batches
    return ways


def _begun(prompts: Sequence[Ids]) -> list[Ids]:
    """Return the first three quarters of prompts, of which a kept context can have been."""
    return [ids[: max(1, len(ids) * 3 // 4)] for ids in prompts]


def _guessed(model: Model, prompts: Sequence[Ids], expected: Sequence[Ids]) -> list[Ids]:
    """Answer with guesses in each step, most of which are right, beside those that pay."""
    own, costs, found = model.stepping.speculation, model.stepping.costs, list[Ids]()
    try:
        for ids, answer in zip(prompts, expected, strict=True):
            model.speculate(_Replay([*ids, *answer], costs))  # type: ignore[arg-type]
            found += _answers(model, [ids], len(answer))
    finally:
        model.speculate(own)
    if own is not None and found == [*expected]:
        return _answers(model, prompts, max(map(len, expected)))
    return found


def _in_batches(model: Model, prompts: Sequence[Ids], expected: Sequence[Ids]) -> list[Ids]:
    found: list[Ids] = [[] for _ in prompts]
    new = max(map(len, expected))
    for number, chunk in model.generate_many(
        prompts, exact=True, max_new_tokens=new, temperature=0
    ):
        if chunk.error is not None:
            raise chunk.error
        found[number] += chunk.token_ids
    return found


def _after_beginnings(model: Model, prompts: Sequence[Ids], expected: Sequence[Ids]) -> list[Ids]:
    """Answer each prompt after another that begins alike, which this model keeps."""
    found = list[Ids]()
    for ids, start, answer in zip(prompts, _begun(prompts), expected, strict=True):
        _answers(model, [start], 1)
        found += _answers(model, [ids], len(answer))
    return found


def _in_chunks(model: Model, prompts: Sequence[Ids], expected: Sequence[Ids]) -> list[Ids]:
    usual, model.engine.planned_chunk = model.engine.planned_chunk, FEWER
    try:
        return _answers(model, prompts, max(map(len, expected)))
    finally:
        model.engine.planned_chunk = usual


class _Replay(Guesses):
    """Guesses from a known text, of each size in turn; some are wrong."""

    def __init__(self, text: Ids, costs: StepCosts | None) -> None:
        self.costs, self.most = costs, MOST - 1
        self._text, self._steps, self._drafted = text, count(), count(1)

    @contextmanager
    def begin(self, *_: object) -> Iterator[Guesses]:
        """Lend itself."""
        yield self

    def after(self, seen: Sequence[int], room: int) -> list[int]:
        size = SIZES[next(self._steps) % len(SIZES)] - 1
        known = self._text[len(seen) : len(seen) + size] if size <= room else []
        known = known if len(known) == size else []
        return [token ^ (next(self._drafted) % WRONG == 0) for token in known]
