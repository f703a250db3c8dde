"""Guesses of a smaller model, which goes on with the text by itself, greedily."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from stem_edge.numerics.quantize import F32
from stem_edge.runtime.engine import Context, Engine
from stem_edge.runtime.prefixes.kept import Prefixes
from stem_edge.runtime.speculation.gate import Chances

EXPECTED = (0.7,) * 7  # how often each drafted token is right before anything is known


class Drafter(NamedTuple):
    """A loaded model that drafts for another one with the same tokenizer."""

    engine: Engine
    prefixes: Prefixes  # which keep its prompts
    context_length: int
    seconds: float  # that it takes for a token
    close: Callable[[], None]


class ModelDrafts:
    """Drafts for one answer."""

    def __init__(self, engine: Engine, context: Context, prompt: Sequence[int]) -> None:
        self._engine, self._context, self._prompt = engine, context, prompt
        self._chances = Chances(EXPECTED)
        self._fed: list[int] = []  # tokens that the context has, once it has the prompt
        self._right = 0  # of those, how many the text has, too
        self._known = 0  # tokens of the text at the latest call of `learn`

    def learn(self, seen: Sequence[int], drafts: Sequence[int]) -> None:
        """Learn from a text that has grown since the last call, after drafts were made for it."""
        if not drafts:
            self._chances.fade()
        for place, (draft, token) in enumerate(zip(drafts, seen[self._known :], strict=False)):
            self._chances.saw(place, draft == token)
            if draft != token:
                break
        self._known = len(seen)

    def chances(self, seen: Sequence[int], count: int) -> list[float]:
        """Return how likely each draft is right; empty if the context has no room for drafts."""
        if len(seen) + count > self._context.length:
            return []
        return [self._chances.of(place) for place in range(count)]

    def draft(self, seen: Sequence[int], count: int) -> list[int]:
        """Return guesses at the next tokens. Raises what a step raises."""
        logits, drafts = self._catch_up(seen), list[int]()
        while True:
            drafts.append(int(logits[-1].argmax()))
            if len(drafts) == count:
                return drafts
            logits = self._feed(drafts[-1:])

    def _catch_up(self, seen: Sequence[int]) -> F32:
        """Compute what the context lacks of the text, at least its last token; return its logits."""
        if not self._fed:
            cached = self._context.position
            for _ in self._engine.process(self._context, self._prompt, computed=cached, top=1):
                pass
            self._fed = list(self._prompt)
        while self._right < min(len(self._fed), len(seen) - 1) and (
            self._fed[self._right] == seen[self._right]
        ):
            self._right += 1
        self._context.rewind(self._right)
        self._right = self._context.position  # 0 if a window has dropped what comes before
        del self._fed[self._right :]
        most = self._engine.chunk_tokens
        for start in range(self._right, len(seen), most):
            logits = self._feed(seen[start : start + most])
        return logits

    def _feed(self, tokens: Sequence[int]) -> F32:
        logits = self._engine.step(self._context, np.array(tokens, np.int64), top=1)
        self._fed += tokens
        return logits
