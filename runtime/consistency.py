"""Checking, on the user's own machine, that a bundle gives the same tokens however it is run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from stem_edge.bundle.opening import open_bundle
from stem_edge.errors import InputError
from stem_edge.runtime.backends.engines import ENGINES, choose_engine
from stem_edge.runtime.backends.interface import MOST, SIZES, StepCosts
from stem_edge.runtime.backends.options import LoadOptions
from stem_edge.runtime.engine import Guesses
from stem_edge.runtime.loading import load_with
from stem_edge.runtime.model import Model
from stem_edge.runtime.text.codec import same_start

PROMPT_TOKENS, NEW_TOKENS = 96, 32
NOT_RUN = "not run"
TEXT = """\
A memory of words is no memory of things: whoever counts the ships in a harbour at dawn, the masts
and the ropes, the gulls above them, will remember the cold, and the colour of the water."""
Progress: TypeAlias = Callable[[str], object]
Ids: TypeAlias = list[int]
WRONG = 5  # one draft of so many is wrong
FEW_TOKENS = 16  # of a chunk, and slots


def verify_runs(
    path: str | Path,
    prompt: str = TEXT,
    max_new_tokens: int = NEW_TOKENS,
    cache_dir: str | Path | None = None,
    progress: Progress = lambda name: None,
) -> dict[str, str]:
    """Generate greedily in every way of running a bundle; way -> "ok", or where tokens differ.

    The prompts are the given text and parts of it. Engines round differently, so an engine is compared with
    itself. Ways whose kernels round differently here are reported as "not run: ...". `progress` is called
    with each way's name before it runs.

    Raises what `load` raises, and InputError if the text is too long.
    """
    results, tile = dict[str, str](), ENGINES[choose_engine(open_bundle(path))].tile
    for way, found in _ways(path, tile, {"cache_dir": cache_dir}, prompt, max_new_tokens):
        progress(way)
        results[way] = found()
    return results


def _ways(
    path: str | Path, tile: int, options: dict[str, Any], text: str, new: int
) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each way, and what runs it. tile: of the engine."""
    with load_with(path, LoadOptions(**options)) as model:
        prompts = _prompts(model, text, new)
        costs, own, slots = model.stepping.costs, model.stepping.speculation, model.plan.slots
        model.speculate(None)
        expected = _fresh(model, prompts, new)
        model.speculate(own)

        def compared(found: list[Ids]) -> str:
            pairs = enumerate(zip(found, expected, strict=True), 1)
            starts = [
                f"of prompt {n} from new token {same_start(*pair) + 1} on"
                for n, pair in pairs
                if pair[0] != pair[1]
            ]
            return f"other tokens {', '.join(starts)}" if starts else "ok"

        yield "again", lambda: compared(_fresh(model, prompts, new))
        yield "kept prompts", lambda: compared(_after_beginnings(model, prompts, new))
        yield "sequences together", lambda: compared(_in_batches(model, prompts, new))
        if costs is not None and costs.same_bits:
            yield "drafts", lambda: compared(_drafted(model, prompts, expected, costs))
        else:
            yield "drafts", lambda: f"{NOT_RUN}: steps of several tokens round otherwise"
        if tile:
            few = f"{NOT_RUN}: steps of few tokens round otherwise"
            yield "small chunks", lambda: few
        else:
            yield "small chunks", lambda: compared(_in_chunks(model, prompts, new))
    if slots and not tile:
        yield "few slots", lambda: compared(_few_slots(path, options, prompts, new))
    yield "prompts kept in files", lambda: compared(_restarted(path, options, prompts, new))


def _prompts(model: Model, text: str, new: int) -> list[Ids]:
    """Return a text, its beginning and its end as prompts. Raises InputError."""
    if (room := model.plan.context_length - new) < 1:
        raise InputError(f"{new} new tokens leave no room for a prompt; ask for fewer")
    ids = model.tokenize(text)[: min(PROMPT_TOKENS, room)]
    return [ids, ids[: (len(ids) + 1) // 2], ids[len(ids) // 3 :]]


def _answers(model: Model, prompts: Sequence[Ids], new: int) -> list[Ids]:
    """Return the greedy answers to prompts, one after the other."""
    answers = (model.generate(ids, max_new_tokens=new, temperature=0) for ids in prompts)
    return [[token for chunk in answer for token in chunk.token_ids] for answer in answers]


def _fresh(model: Model, prompts: Sequence[Ids], new: int) -> list[Ids]:
    """Return the answers to prompts of which nothing was kept."""
    found = list[Ids]()
    for ids in prompts:
        model.forget_prefixes()
        found += _answers(model, [ids], new)
    return found


def _begun(prompts: Sequence[Ids]) -> list[Ids]:
    """Return the first three quarters of prompts, of which a kept context can have been."""
    return [ids[: max(1, len(ids) * 3 // 4)] for ids in prompts]


def _after_beginnings(model: Model, prompts: Sequence[Ids], new: int) -> list[Ids]:
    """Answer each prompt after another that begins alike, which this model keeps."""
    found = list[Ids]()
    for ids, start in zip(prompts, _begun(prompts), strict=True):
        model.forget_prefixes()
        _answers(model, [start], 1)
        found += _answers(model, [ids], new)
    return found


def _in_batches(model: Model, prompts: Sequence[Ids], new: int) -> list[Ids]:
    model.forget_prefixes()
    found: list[Ids] = [[] for _ in prompts]
    many = model.generate_many(prompts, exact=True, max_new_tokens=new, temperature=0)
    for number, chunk in many:
        if chunk.error is not None:
            raise chunk.error
        found[number] += chunk.token_ids
    return found


def _in_chunks(model: Model, prompts: Sequence[Ids], new: int) -> list[Ids]:
    usual, model.engine.planned_chunk = model.engine.planned_chunk, FEW_TOKENS
    try:
        return _fresh(model, prompts, new)
    finally:
        model.engine.planned_chunk = usual


def _few_slots(
    path: str | Path, options: dict[str, Any], prompts: Sequence[Ids], new: int
) -> list[Ids]:
    model = open_bundle(path).manifest.model
    slots = min(FEW_TOKENS * model.lookups + max(0, model.row_window - 1), model.records)
    with load_with(path, LoadOptions(slots=slots, **options)) as loaded:
        return _answers(loaded, prompts, new)


def _restarted(
    path: str | Path, options: dict[str, Any], prompts: Sequence[Ids], new: int
) -> list[Ids]:
    with tempfile.TemporaryDirectory() as folder:
        with load_with(path, LoadOptions(prompt_cache=folder, **options)) as model:
            _answers(model, _begun(prompts), 1)
        with load_with(path, LoadOptions(prompt_cache=folder, **options)) as model:
            return _answers(model, prompts, new)


def _drafted(
    model: Model, prompts: Sequence[Ids], expected: Sequence[Ids], costs: StepCosts
) -> list[Ids]:
    """Answer with drafts in each step, most of which are right."""
    own, found = model.stepping.speculation, list[Ids]()
    try:
        for ids, answer in zip(prompts, expected, strict=True):
            model.speculate(_Replay([*ids, *answer], costs))  # type: ignore[arg-type]
            found += _fresh(model, [ids], len(answer))
    finally:
        model.speculate(own)
    return found


class _Replay(Guesses):
    """Drafts from a known text, of each size in turn; some are wrong."""

    def __init__(self, text: Ids, costs: StepCosts) -> None:
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
