"""Check that a bundle generates the same tokens however it is run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

from stem_edge.errors import InputError
from stem_edge.runtime.backends.interface import SIZES
from stem_edge.runtime.backends.options import Draft, LoadOptions
from stem_edge.runtime.loading import load_with
from stem_edge.runtime.model import Model
from stem_edge.runtime.text.codec import same_start

PROMPT_TOKENS, NEW_TOKENS = 96, 32
NOT_RUN = "not run"
TEXT = """\
A memory of words is no memory of things: whoever counts the ships in a harbour at dawn, the masts
and the ropes, the gulls above them, will remember the cold, and the colour of the water."""
Ids: TypeAlias = list[int]
WRONG = 5  # every fifth drafted token is wrong


def verify_runs(
    path: str | Path,
    max_new_tokens: int = NEW_TOKENS,
    cache_dir: str | Path | None = None,
    progress: Callable[[str], object] = lambda name: None,
) -> dict[str, str]:
    """Generate greedily in several ways; return "ok" for each way, or where its tokens differ.

    The result for drafts is "not run: ..." if steps of several tokens round differently on this machine.
    progress: called with the name of each way before it runs.

    Raises what `load` raises, and InputError if the context is too short.
    """
    options, new, results = LoadOptions(cache_dir=cache_dir), max_new_tokens, dict[str, str]()
    with load_with(path, replace(options, speculate=False)) as model:
        prompts, costs = _prompts(model, new), model.stepping.costs
        expected = _fresh(model, prompts, new)

    def check(way: str, run: Callable[[Model], list[Ids]], **changes: Any) -> None:
        progress(way)
        with load_with(path, replace(options, **changes)) as model:
            results[way] = _compared(run(model), expected)

    check("kept prompts", lambda model: _after_beginnings(model, prompts, new))
    check("sequences together", lambda model: _in_batches(model, prompts, new))
    if costs is not None and costs.same_bits:
        texts = [[*ids, *answer] for ids, answer in zip(prompts, expected, strict=True)]
        check("drafts", lambda model: _fresh(model, prompts, new), speculate=_replay(texts))
    else:
        progress("drafts")
        results["drafts"] = f"{NOT_RUN}: steps of several tokens round differently"
    with tempfile.TemporaryDirectory() as folder:
        with load_with(path, replace(options, prompt_cache=folder)) as model:
            _answers(model, _begun(prompts), 1)
        files = "prompts kept in files"
        check(files, lambda model: _answers(model, prompts, new), prompt_cache=folder)
    return results


def _compared(found: list[Ids], expected: list[Ids]) -> str:
    starts = [
        f"of prompt {n} from new token {same_start(*pair) + 1} on"
        for n, pair in enumerate(zip(found, expected, strict=True), 1)
        if pair[0] != pair[1]
    ]
    return f"other tokens {', '.join(starts)}" if starts else "ok"


def _prompts(model: Model, new: int) -> list[Ids]:
    """Return TEXT, its beginning and its end as prompts. Raises InputError."""
    if (room := model.plan.context_length - new) < 1:
        raise InputError(f"{new} new tokens leave no room for a prompt; ask for fewer")
    ids = model.tokenize(TEXT)[: min(PROMPT_TOKENS, room)]
    return [ids, ids[: (len(ids) + 1) // 2], ids[len(ids) // 3 :]]


def _answers(model: Model, prompts: Sequence[Ids], new: int) -> list[Ids]:
    """Return the greedy answers to prompts, one after the other."""
    answers = (model.generate(ids, max_new_tokens=new, temperature=0) for ids in prompts)
    return [[token for chunk in answer for token in chunk.token_ids] for answer in answers]


def _fresh(model: Model, prompts: Sequence[Ids], new: int) -> list[Ids]:
    """Return the answers to prompts, with no cached prefix."""
    found = list[Ids]()
    for ids in prompts:
        model.forget_prefixes()
        found += _answers(model, [ids], new)
    return found


def _begun(prompts: Sequence[Ids]) -> list[Ids]:
    """Return the first three quarters of each prompt, for the prefix cache."""
    return [ids[: max(1, len(ids) * 3 // 4)] for ids in prompts]


def _after_beginnings(model: Model, prompts: Sequence[Ids], new: int) -> list[Ids]:
    """Return the answers to prompts, each with its beginning in the prefix cache."""
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


def _replay(texts: Sequence[Ids]) -> Draft:
    """Return a draft function that continues known texts, with every WRONG-th token wrong."""
    steps, drafted = count(), count(1)

    def draft(seen: Sequence[int], room: int) -> Ids:
        size, at = SIZES[next(steps) % len(SIZES)] - 1, len(seen)
        known = next((text[at : at + size] for text in texts if text[:at] == list(seen)), [])
        return [token ^ (next(drafted) % WRONG == 0) for token in known]

    return draft
