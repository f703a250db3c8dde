"""Guesses of a smaller model, which goes on with the text by itself, greedily."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from stem_edge.errors import InputError
from stem_edge.numerics.quantize import F32
from stem_edge.runtime.backends.context import Context
from stem_edge.runtime.engine import Engine, Step
from stem_edge.runtime.prefixes.kept import Prefixes
from stem_edge.runtime.speculation.drafts import Drafts
from stem_edge.runtime.texts import process


class Drafter(NamedTuple):
    """A loaded model that drafts for another one with the same tokenizer."""

    engine: Engine
    prefixes: Prefixes  # which keep its prompts
    context_length: int
    seconds: float  # that it takes for a token
    close: Callable[[], None]  # closes the model

    @contextmanager
    def begin(self, prompt: Sequence[int], length: int, context: Context) -> Iterator[Drafts]:
        """See Source."""
        if len(prompt) >= self.context_length:
            raise InputError(f"a prompt of {len(prompt)} tokens is too long for what drafts")
        longest = min(length, self.context_length)
        with self.prefixes.lent(prompt, {}, longest, whole=True) as own:
            yield ModelDrafts(self.engine, own, prompt, self.seconds)


class ModelDrafts(Drafts):
    """Drafts for one answer."""

    def __init__(
        self, engine: Engine, context: Context, prompt: Sequence[int], seconds: float
    ) -> None:
        super().__init__()
        self._engine, self._context, self._prompt = engine, context, prompt
        self.seconds = seconds
        self._fed: list[int] = []  # tokens that the context has, once it has the prompt
        self._right = 0  # of those, how many the text has, too

    def chances(self, seen: Sequence[int], count: int) -> list[float]:
        """Return how likely each draft is right; empty if the context has no room for drafts."""
        if len(seen) + count > self._context.length:
            return []
        return super().chances(seen, count)

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
            for _ in process(self._engine, self._context, self._prompt, computed=cached):
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
        row_ids = self._engine.rows.following(self._fed, tokens)
        step = Step(np.array(tokens, np.int64), row_ids, 1)
        logits = self._engine.step([self._context], step)
        self._fed += tokens
        return logits
