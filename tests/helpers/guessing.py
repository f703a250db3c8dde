"""Guesses that know the answer, so that tests decide how many there are, and which are right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from stem_edge.runtime import Model
from stem_edge.runtime.backends.interface import StepCosts
from stem_edge.runtime.engine import Context, Guesses
from stem_edge.runtime.generation import Chunk
from stem_edge.runtime.speculation.speculation import Speculation

CHEAP = StepCosts(seconds=0.01, times={2: 1.01, 4: 1.02, 8: 1.05}, same_bits=True)
SIZES = (7, 1, 0, 3, 5, 2)  # drafts of a step, in turn


class Told(Guesses):
    """Drafts what follows in a known text; every n-th draft is another token."""

    def __init__(self, text: Sequence[int], wrong: int, sizes: Sequence[int] = SIZES) -> None:
        self.text, self.wrong, self.sizes = text, wrong, sizes
        self.calls, self.drafted = 0, count(1)

    def after(self, seen: Sequence[int], room: int) -> list[int]:
        """Draft the tokens at the same places of the known text."""
        size = min(room, self.sizes[self.calls % len(self.sizes)])
        self.calls += 1
        known = self.text[len(seen) : len(seen) + size]
        return [token ^ (next(self.drafted) % self.wrong == 0) for token in known]


class ToldSpeculation(Speculation):
    """Lets a model guess as Told does."""

    def __init__(self, text: Sequence[int], wrong: int = 1 << 30, **more: Any) -> None:
        super().__init__(CHEAP, 7)
        self.told = Told(text, wrong, **more)

    @contextmanager
    def begin(self, prompt: Sequence[int], length: int, context: Context) -> Iterator[Guesses]:
        """Lend the guesses."""
        yield self.told


def answer_of(chunks: Sequence[Chunk]) -> tuple[str, list[int], str | None]:
    """Text, token ids and finish reason of an answer."""
    ids = [token for chunk in chunks for token in chunk.token_ids]
    return "".join(chunk.text for chunk in chunks), ids, chunks[-1].finish_reason


def answered(
    model: Model, prompt: Sequence[int], speculation: Speculation | None = None, **options: Any
) -> tuple[str, list[int], str | None]:
    """Return the whole answer of a model that speculates thus."""
    model.speculate(speculation)
    return answer_of(list(model.generate(prompt, **options)))
