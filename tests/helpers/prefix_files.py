"""Prefixes in files without a model: contexts that are nothing but arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from stem_edge.runtime.backends.context import PromptKey
from stem_edge.runtime.backends.interface import BackendContext
from stem_edge.runtime.engine import starts_of
from stem_edge.runtime.prefixes.folder import PrefixFolder

IDS = list(range(400))


class Arrays:
    """A context that is nothing but its keys and values."""

    earliest = 0

    def __init__(self, dtype: Any = np.float32, tokens: int = 1000) -> None:
        self.views = [np.zeros((2, tokens, 4), dtype), np.zeros((1, tokens, 8), dtype)]

    def kept(self, tokens: int) -> list[Any]:
        return [view[:, :tokens] for view in self.views]

    def restore(self, arrays: Any, tokens: int) -> None:
        for view, array in zip(self.kept(tokens), arrays, strict=True):
            view[...] = array


def filled(dtype: Any = np.float32) -> Any:
    context, rng = Arrays(dtype), np.random.default_rng(0)
    for view in context.views:
        view[...] = rng.integers(-100, 100, view.shape)
    return context


def prompt(ids: list[int]) -> PromptKey:
    return PromptKey(ids, {}, starts_of(len(ids), 128))


def found(folder: PrefixFolder, ids: list[int], context: Any) -> int:
    """Return how many tokens the folder gives for a prompt, after checking their values."""
    best = folder.find(prompt(ids), "pairs", 0)
    if best is None:
        return 0
    path, tokens = best
    target = Arrays(context.views[0].dtype)
    if not folder.read(path, tokens, as_context(target)):
        return 0
    for view, expected in zip(target.kept(tokens), context.kept(tokens), strict=True):
        assert (view == expected).all()
    return tokens


def as_context(arrays: Any) -> BackendContext:
    made: BackendContext = arrays
    return made
